"""Values of all ranks are sent in chunks, from one rank at a time; what is gathered is what was given."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.trainer import evaluation
from halfmesh.utils.tensors import tensors_of
from tests.support.models import make_data, make_engine
from tests.support.ranks import run_ranks


def values_of(rank):
    """Unlike on each rank."""
    rows = torch.arange(7 * rank, dtype=torch.float32)
    return [
        None,
        {"a": rows.view(-1, 7).bfloat16(), "b": (torch.tensor(rank), "word"), "c": rows.view(-1, 7).t() > 3},
        [torch.zeros(0, 3), torch.eye(3).to_sparse(), torch.ones(2), torch.tensor([1j * rank])],
    ][rank]


def same(mine, theirs):
    is_alike = (type(mine), mine.dtype, mine.shape) == (type(theirs), theirs.dtype, theirs.shape)
    return is_alike and torch.equal(mine.to_dense(), theirs.to_dense())


def gathered(rank, world_size, chunk):
    context = make_engine().context
    sizes, evaluation.CHUNK, broadcast = [], chunk, dist.broadcast
    dist.broadcast = lambda tensor, *args: sizes.append(tensor.nbytes) or broadcast(tensor, *args)
    return evaluation.gather_tensors(values_of(rank), context), sizes


@pytest.mark.distributed
@pytest.mark.parametrize("chunk", [10, 2**20])
def test_any_values_of_any_ranks(chunk):
    for found, sizes in run_ranks(gathered, 3, chunk, fresh=True):
        for value, expected in zip(found, map(values_of, range(3)), strict=True):
            tensors, others = tensors_of(value), tensors_of(expected)
            assert repr(value) == repr(expected)
            assert all(map(same, tensors, others))
        assert max(sizes) <= chunk
        assert len(sizes) == 3 if chunk > 10 else len(sizes) > 30


def predicted(rank, world_size, rows):
    """The sizes of the objects that ranks gather for their predictions, and the predictions."""
    engine, sizes, gather_objects = make_engine(criterion=None), [], dist.all_gather_object
    dist.all_gather_object = lambda found, value, group=None: (
        sizes.append(len(pickle.dumps(value))) or gather_objects(found, value, group=group)
    )
    outputs = halfmesh.Trainer(engine).predict(DataLoader(TensorDataset(*make_data(rows)), rows))
    return sizes, outputs


@pytest.mark.distributed
def test_predictions_are_no_objects():
    (few, _), _ = run_ranks(predicted, 2, 5, fresh=True)
    (sizes, outputs), (_, others) = run_ranks(predicted, 2, 20_001, fresh=True)
    assert len(outputs) == 20_001
    assert torch.equal(outputs, others)
    assert sum(sizes) < sum(few) + 100
