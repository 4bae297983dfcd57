"""Outputs and losses of an evaluation are those of one process, whatever ranks have; how values of ranks are sent."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import halfmesh
from halfmesh.errors import InputError
from halfmesh.trainer import evaluation
from halfmesh.utils.tensors import tensors_of
from tests.support.checkpoint_runs import Net
from tests.support.checkpoint_runs import make_engine as engine_in_layout
from tests.support.models import make_data, make_engine
from tests.support.ranks import run_ranks

cross_entropy = nn.functional.cross_entropy


def evaluated(rank, world_size, layouts):
    """The loss, and outputs, of 13 samples in batches of 4: uneven everywhere. Then of batches that a sampler gives,
    and of items that are batches."""
    results = []
    data = TensorDataset(*make_data(13))
    batches = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    loaders = [DataLoader(data, 4), DataLoader(data, batch_sampler=batches), DataLoader(data, None, sampler=batches)]
    for layout in layouts:
        with engine_in_layout(layout, "none") as engine:
            trainer = halfmesh.Trainer(engine)
            results += [(trainer.evaluate(loader)["eval_loss"], trainer.predict(loader)) for loader in loaders]
    return results


@pytest.mark.distributed
@pytest.mark.sends
def test_loss_and_predictions_are_those_of_one_process():
    model, (x, y) = Net(0.0, 0).eval(), make_data(13)
    expected = model(x)
    everyone = run_ranks(evaluated, 2, ["dp2", "tp2", "pp2", "fsdp"])
    for results in [evaluated(0, 1, ["one"]), *everyone]:
        for loss, outputs in results:
            assert loss == pytest.approx(cross_entropy(expected, y).item(), rel=1e-5)
            torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    assert [[loss for loss, _ in results] for results in everyone] == [[loss for loss, _ in everyone[0]]] * 2


class Reader(nn.Module):
    """Scores of packed sequences."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, packed):
        return self.head(self.rnn(packed)[1][-1])


def pack(samples):
    return nn.utils.rnn.pack_sequence([x for x, _ in samples], enforce_sorted=False), torch.tensor(
        [y for _, y in samples]
    )


def read(rank, world_size, *strategies):
    rows, found = make_data(13)[0], []
    samples = [(row.repeat(1 + i % 4, 1), i % 4) for i, row in enumerate(rows)]
    for data in strategies:
        loader = DataLoader(samples, 6 // world_size, collate_fn=pack)
        with make_engine({"parallel": {"data": data}}, model=Reader(), loader=loader) as engine:
            trainer, evaluated = halfmesh.Trainer(engine), DataLoader(samples[:11], 4, collate_fn=pack)
            trainer.fit(max_steps=2)
            found.append((trainer.evaluate(evaluated)["eval_loss"], trainer.predict(evaluated)))
    return found


@pytest.mark.distributed
def test_packed_sequences_count_as_sequences():
    ((loss, outputs),) = read(0, 1, "replicate")
    assert loss == pytest.approx(cross_entropy(outputs, torch.arange(11) % 4).item(), rel=1e-5)
    for found in run_ranks(read, 2, "replicate", "fsdp"):
        torch.testing.assert_close(found, [(loss, outputs)] * 2, rtol=1e-5, atol=1e-5)


LENGTHS = 3, 3, 2, 5, 4
SEQUENCES = [torch.arange(length) + length for length in LENGTHS]


class Tagger(nn.Module):
    """Scores of each token, and a state of each sequence."""

    def __init__(self, extra=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.extra, self.calls = nn.Embedding(16, 8), nn.Linear(8, 5), extra, 0

    def forward(self, x):
        self.calls += 1
        scores = self.head(self.embedding(x))
        extra = f"call {self.calls}: {x.sum()}" if self.extra == "new" else self.extra
        return {"scores": scores, "state": (scores[:, 0],)} | ({} if extra is None else {"extra": extra})


def predicted(rank, world_size, extra=None, rejected=False):
    """The outputs for sequences, padded to the longest of a batch."""
    model = Tagger(extra)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    with make_engine(model=model, criterion=None) as engine:
        trainer = halfmesh.Trainer(engine)
        if not rejected:
            return trainer.predict(DataLoader(SEQUENCES, 2, collate_fn=pad))
        with pytest.raises(InputError, match=r"first dim, .*take turns in samples, but the sizes of one output are"):
            trainer.predict(DataLoader(SEQUENCES, 2, collate_fn=pad))
        return True


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_predictions_of_other_lengths_are_a_list(ranks):
    """Of batches, or of samples."""
    model = Tagger()
    for outputs in run_ranks(predicted, 2) if ranks == 2 else [predicted(0, 1)]:
        assert [len(output["scores"]) for output in outputs] == ([2, 2, 1] if ranks == 1 else [1] * 5)
        if ranks == 1:
            assert [output["scores"].shape[1] for output in outputs] == [3, 5, 4]
        rows = [row for output in outputs for row in zip(output["scores"], output["state"][0], strict=True)]
        for x, (scores, state) in zip(SEQUENCES, rows, strict=True):
            expected = model(x[None])
            torch.testing.assert_close(scores[: len(x)], expected["scores"][0])
            torch.testing.assert_close(state, expected["state"][0][0])


@pytest.mark.distributed
def test_outputs_without_a_row_for_each_sample():
    """Lists of batches in one process; rejected on data ranks, which split batches."""
    for extra in (torch.tensor(1.0), torch.ones(7, 5)):
        outputs = predicted(0, 1, extra)
        assert [output["extra"].shape for output in outputs] == [extra.shape] * 3
        assert run_ranks(predicted, 2, extra, True) == [True, True]
    outputs = predicted(0, 1, "new")
    assert [output["extra"][:6] for output in outputs] == ["call 1", "call 2", "call 3"]
    for outputs in run_ranks(predicted, 2, "the same"):
        assert {output["extra"] for output in outputs} == {"the same"}


@pytest.mark.parametrize("value", ["a", np.ones(2)])
def test_values_that_change_from_batch_to_batch_are_kept(value):
    class Valued(nn.Linear):
        def forward(self, x):
            return {"y": super().forward(x), "value": value * int(x[0, 0])}

    engine = make_engine(model=Valued(1, 1), criterion=None)
    trainer, x = halfmesh.Trainer(engine), torch.arange(1.0, 5.0)[:, None]
    assert [str(output["value"]) for output in trainer.predict(DataLoader(x, 2))] == [str(value), str(value * 3)]
    assert trainer.predict(DataLoader(torch.ones(4, 1), 2))["y"].shape == (4, 1)
    engine.close()


# --- what is sent -----------------------------------------------------------------------------------------------------


def values_of(rank):
    """Unlike on each rank."""
    rows = torch.arange(7.0)
    return [
        {"a": rows.view(-1, 7).bfloat16(), "b": (torch.tensor(1), "word"), "c": rows.view(-1, 7).t() > 3},
        [None, torch.zeros(0, 3), torch.eye(3).to_sparse(), torch.ones(2), torch.tensor([1j])],
    ][rank]


def same(mine, theirs):
    is_alike = (type(mine), mine.dtype, mine.shape) == (type(theirs), theirs.dtype, theirs.shape)
    return is_alike and torch.equal(mine.to_dense(), theirs.to_dense())


def gathered(rank, world_size, chunk):
    """What all ranks have, and the sizes of what was sent for it in chunks."""
    context, sizes, broadcast = make_engine().context, [], dist.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "CHUNK", chunk)
        patch.setattr(dist, "broadcast", lambda tensor, *args: sizes.append(tensor.nbytes) or broadcast(tensor, *args))
        return evaluation.gather_tensors(values_of(rank), context), sizes


@pytest.mark.distributed
@pytest.mark.parametrize("chunk", [10, 2**20])
def test_any_values_of_any_ranks(chunk):
    for found, sizes in run_ranks(gathered, 2, chunk):
        for value, expected in zip(found, map(values_of, range(2)), strict=True):
            assert repr(value) == repr(expected)
            assert all(map(same, tensors_of(value), tensors_of(expected)))
        assert max(sizes) <= chunk
        assert len(sizes) == 2 if chunk > 10 else len(sizes) > 10


def sizes_of_objects(rank, world_size, rows):
    """Of those that ranks gather for their predictions, and the predictions."""
    engine, sizes, gather_objects = make_engine(criterion=None), [], dist.all_gather_object
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist,
            "all_gather_object",
            lambda found, value, group=None: (
                sizes.append(len(pickle.dumps(value))) or gather_objects(found, value, group=group)
            ),
        )
        return sizes, halfmesh.Trainer(engine).predict(DataLoader(TensorDataset(*make_data(rows)), rows))


@pytest.mark.distributed
def test_predictions_are_no_objects():
    (few, _), _ = run_ranks(sizes_of_objects, 2, 5)
    (sizes, outputs), (_, others) = run_ranks(sizes_of_objects, 2, 20_001)
    assert len(outputs) == 20_001
    assert torch.equal(outputs, others)
    assert sum(sizes) < sum(few) + 100
