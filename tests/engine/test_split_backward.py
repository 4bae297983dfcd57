"""Schedules that compute the gradients of a stage's inputs and of its weights apart: zero_bubble, zbv and dualpipev."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfmesh.compat import check
from halfmesh.config.load import load_config
from tests.support.models import make_data
from tests.support.pipeline_parts import SCHEDULES, Deep, make, pipe, step, whole
from tests.support.ranks import here, run_ranks
from tests.support.versions import TORCH

SPLIT = ("zero_bubble", "zbv", "dualpipev")
pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="refused: torch counts some weights twice")


def batch(number):
    x, y = make_data(32)
    return x[number * 8 :][:8], y[number * 8 :][:8]


def config_of(schedule, **more):
    return {**pipe(microbatches=4, schedule=schedule, **SCHEDULES[schedule]), **more}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parallel": {"data": "fsdp"}}, "which 'fsdp' would not notice; use data='zero1', or schedule='interleaved'"),
        ({"compile": True}, "compiled code has one backward for all; leave compile out"),
        ({"activation_checkpoint": "full"}, "activations would be computed or fetched twice; leave that out"),
        ({"activation_offload": True}, "activations would be computed or fetched twice"),
        ({"gradient_dtype": "float32"}, "adds weights' gradients up in the dtype of the weights; leave gradient_dtype"),
    ],
)
def test_what_needs_whole_backwards_is_refused(more, words):
    for schedule in SPLIT:
        config = config_of(schedule)
        config["parallel"] |= more.get("parallel", {})
        found = check(load_config({**config, **more, "parallel": config["parallel"]}), 4, "cpu")
        assert [finding.where for finding in found] == ["parallel.pipeline.schedule"]
        assert words in found[0].message
    assert check(load_config(config_of("interleaved")), 4, "cpu") == []


def test_torch_that_counts_weights_twice_is_refused(monkeypatch):
    """Those that a stage uses several times: a GRU's, those of a layer that is called twice, tied ones."""
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.12.1+cpu"))
    for schedule in SPLIT:
        (found,) = check(load_config(config_of(schedule)), 2, "cpu")
        assert "torch 2.12.1+cpu counts weights that a stage uses several times" in found.message
    assert check(load_config(config_of("interleaved")), 2, "cpu") == []


@pytest.mark.parametrize(
    ("schedule", "options", "where", "words"),
    [
        ("zbv", {"chunks": 3}, "chunks", "has two chunks per rank, not 3; use chunks=2"),
        ("zbv", {"chunks": 1}, "chunks", "use chunks=2"),
        ("dualpipev", {"chunks": 2, "microbatches": 3}, "microbatches", "3 is fewer than the 4 stages"),
        ("zero_bubble", {"chunks": 2, "microbatches": 3}, "microbatches", "is not a multiple of the 2 ranks"),
        ("zero_bubble", {"chunks": 1}, "chunks", "leaves nothing to interleave"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(schedule, options, where, words):
    found = check(load_config(pipe(**{"microbatches": 4, "schedule": schedule, **options})), 2, "cpu")
    assert [finding.where for finding in found] == [f"parallel.pipeline.{where}"]
    assert words in found[0].message


def train_and_evaluate(rank, world_size, schedule):
    config = config_of(schedule, clip_grad_norm=0.5, gradient_accumulation=2)
    config["parallel"]["pipeline"]["eval_outputs"] = "all"
    engine = make(config)
    places = (engine.context.pp_rank, engine.context.is_last_stage, [m.index for m in engine._executor.stages])
    for number in range(4):
        step(engine, *batch(number))
    engine.eval()
    output = engine(here(make_data(5)[0]))
    return places, output, whole(engine)


@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("schedule", SPLIT)
def test_weights_and_evaluation_are_those_of_one_process(schedule):
    found = run_ranks(train_and_evaluate, 2, schedule)
    one = make({"clip_grad_norm": 0.5, "gradient_accumulation": 2}, Deep())
    for number in range(4):
        step(one, *batch(number))
    one.eval()
    expected, state = one(make_data(5)[0]), one.model.state_dict()
    stages = [[0, 2], [1, 3]] if schedule == "zero_bubble" else [[0, 3], [1, 2]]
    for (rank, is_last, held), output, weights in found:
        assert held == stages[rank]
        assert is_last == (3 in held)
        torch.testing.assert_close(output, expected.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(weights, dict(state), rtol=0, atol=1e-5)


class Sides(nn.Module):
    """A parameter that only some inputs reach, and a frozen one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used, self.frozen, self.never = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.frozen(torch.tanh(self.used(x)))


def train_with_sides(rank, world_size, schedule):
    engine = make(config_of(schedule), Deep(Sides(1), Sides(2)))
    for number in range(3):
        step(engine, *batch(number))
    return whole(engine)


@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("schedule", SPLIT)
def test_frozen_and_unused_parameters(schedule):
    one = make({}, Deep(Sides(1), Sides(2)))
    for number in range(3):
        step(one, *batch(number))
    for weights in run_ranks(train_with_sides, 2, schedule):
        torch.testing.assert_close(weights, dict(one.model.state_dict()), rtol=0, atol=1e-5)


class Apply(nn.Module):
    """A layer on another view of its input."""

    def __init__(self, layer, view):
        super().__init__()
        self.layer, self.view = layer, view

    def forward(self, x):
        return self.view(self.layer, x)


STRIDED = {
    "conv": (lambda: nn.Conv1d(4, 4, 3, padding=1), lambda layer, x: layer(x.transpose(1, 2)).transpose(1, 2)),
    "gru": (lambda: nn.GRU(4, 4), lambda layer, x: layer(x.transpose(0, 1))[0].transpose(0, 1)),
    "permuted": (lambda: nn.Linear(4, 4), lambda layer, x: layer(x.permute(0, 2, 1)).tanh().mT),
    "expanded": (lambda: nn.Linear(1, 4), lambda layer, x: layer(x.mean(2, keepdim=True)).expand(-1, -1, 4)),
    "one_row": (lambda: nn.Linear(4, 4), lambda layer, x: layer(x[:, None].transpose(0, 1))[0].tanh()),
}
"""Layers whose outputs, or their inputs' gradients, are not contiguous."""


def strided(name):
    torch.manual_seed(0)
    make_layer, view = STRIDED[name]
    first, last = (
        nn.Sequential(nn.Linear(8, 16), nn.Unflatten(1, (4, 4))),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 4)),
    )
    return nn.Sequential(first, *(Apply(make_layer(), view) for _ in range(3)), last)


def train_strided(rank, world_size, schedule):
    found = {}
    for name in STRIDED:
        config = pipe(microbatches=4, schedule=schedule, partition=("1", "2", "3"), **SCHEDULES[schedule])
        engine = make(config, strided(name))
        for number in range(3):
            step(engine, *batch(number))
        found[name] = whole(engine)
    return found


@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("schedule", SPLIT)
def test_gradients_that_are_not_contiguous(schedule):
    found = run_ranks(train_strided, 2, schedule)
    for name in STRIDED:
        one = make({}, strided(name))
        for number in range(3):
            step(one, *batch(number))
        for weights in found:
            torch.testing.assert_close(weights[name], dict(one.model.state_dict()), rtol=0, atol=1e-5)
