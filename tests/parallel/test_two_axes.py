"""Two axes of other packages on one model: the norm, the checks of replicas and the whole weights see both."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.example_runs import ROOT
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import rejection
from tests.support.whole import close_whole

CONFIG = {"clip_grad_norm": 0.1, "track_grad_norm": True, "gradient_accumulation": 2}


def register_axes():
    """Of the linear layers, "first" divides those of even numbers and "second" the others."""
    sys.path.insert(0, str(ROOT / "examples" / "plugin" / "src"))
    from halfmesh_plugin_example.wide import Wide, WideLayers

    for number, (name, short) in enumerate((("first", "wa"), ("second", "wb"))):

        class Some(Wide):
            dim = short

            @staticmethod
            def plan(inputs, number=number):
                found, problems = Wide.plan(inputs)
                return found[number::2], problems

            @staticmethod
            def apply(inputs, short=short):
                return WideLayers(inputs, short)

        if name not in halfmesh.AXES:  # the ranks of the next test are the same processes
            halfmesh.AXES.register(name, Some)


def train(parallel, seed=0):
    """The whole model's state, the gradient norms, and the rows of the first layer that this rank has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine = halfmesh.initialize(
        model, optimizer, nn.CrossEntropyLoss(), config={**CONFIG, "parallel": parallel}, device=rank_device()
    )
    torch.manual_seed(seed)
    x = here(torch.randn(40, 6))
    y, place, norms = (x[:, 0] > 0).long(), slice(engine.context.dp_rank, None, engine.context.dp_size), []
    for _ in range(6):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x[place]), y[place]))
        result = engine.step()
        norms += [] if result is None else [float(result.grad_norm)]
    rows = len(model[0].weight), len(model[2].weight)
    return close_whole(engine), norms, rows


def train_on_ranks(rank, world_size, parallel):
    register_axes()
    return train(parallel)


def train_on_different_inputs(rank, world_size):
    """Over the inner axis, and over the outer one."""
    register_axes()
    return [rejection(lambda s=seed: train({"first": 2, "second": 2}, seed=s)) for seed in (rank % 2, rank // 2)]


@pytest.mark.distributed
def test_parity():
    """With each other, and with data ranks that shard what is left."""
    expected, norms, _ = train({})
    for parallel, world_size in (({"first": 2, "second": 2}, 4), ({"second": 2, "data": "zero1"}, 4)):
        found = run_ranks(train_on_ranks, world_size, parallel)
        for state, seen, rows in found:
            assert rows == ((4, 4) if "first" in parallel else (8, 4))
            torch.testing.assert_close(state, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(seen, norms, rtol=1e-4, atol=0)
        assert all(seen == found[0][1] for _, seen, _ in found), "the norm is exactly equal on all ranks"


@pytest.mark.distributed
def test_inputs_that_differ_over_either_axis_are_rejected():
    for messages in run_ranks(train_on_different_inputs, 4):
        assert all("wide group" in message for message in messages)
