"""The contract of axes."""

import copy
import pickle

import pytest
import torch
from torch import nn

from halfmesh import InputError
from halfmesh.config.schema import ParallelConfig
from halfmesh.engine.parallelize import refuse_common_splits
from halfmesh.parallel.axis import AppliedAxis
from halfmesh.parallel.mesh import ParallelContext
from halfmesh.parallel.shard_spec import Split

CONTEXT = ParallelContext(ParallelConfig().dims(1), torch.device("cpu"))


def test_two_axes_that_split_one_parameter_are_refused():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one, other = AppliedAxis(CONTEXT, "tp"), AppliedAxis(CONTEXT, "pp")
    one.split(optimizer, model.weight, Split())
    other.split(optimizer, model.bias, Split())
    refuse_common_splits({"tensor": one, "wide": other})
    other.split(optimizer, model.weight, Split())
    with pytest.raises(InputError, match=r"parallel.tensor and parallel.wide both split 1 parameter; "):
        refuse_common_splits({"tensor": one, "wide": other})


def test_copies_of_a_model_share_how_it_is_divided_and_pickles_are_refused():
    applied = AppliedAxis(CONTEXT, "tp")
    assert copy.deepcopy(applied) is applied
    with pytest.raises(InputError, match="sharded model cannot be pickled"):
        pickle.dumps(applied)
