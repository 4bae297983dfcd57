"""Loops that could train otherwise under zero1 and fsdp than with replicated weights, which are the oracle."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import InputError
from tests.parallel.sharding.runs import MODES, Net, all_equal, batch, make_engine, whole
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)


def evaluate(engine, rank, step):
    """Between backward and step, as for a training accuracy."""
    engine.eval()
    with torch.no_grad():
        engine(batch(rank, 100 + step)[0])
    engine.train()


def look_ahead(engine, rank, step):
    """A forward in training, without a backward."""
    engine(batch(rank, 100 + step)[0])


def freeze(engine, rank, step):
    engine.model.begin.requires_grad_(step % 2 == 1)
    engine.model.blocks[1].requires_grad_(step != 1)


def twice(engine, rank, step):
    """A second loss of the same update."""
    x, y = batch(rank, 50 + step)
    engine.backward(engine.criterion(engine(x), y))


KEPT = {"reshard_after_forward": False}
PROGRAMS = {
    "evaluation before the step": (evaluate, {}),
    "gathered weights are kept": (evaluate, KEPT),
    "kept, and a forward before the step": (look_ahead, KEPT),
    "frozen and unfrozen": (freeze, {}),
    "two losses": (twice, {}),
}
"""What happens between backward and step, and options of fsdp."""


def loop(engine, rank, between, steps=4):
    for step in range(steps):
        engine.zero_grad()
        x, y = batch(rank, step)
        engine.backward(engine.criterion(engine(x), y))
        between(engine, rank, step)
        engine.step()


def run(rank, world_size):
    """The weights by program and strategy."""
    found = {}
    for name, (between, options) in PROGRAMS.items():
        found[name] = {}
        for strategy in ("zero1", "fsdp", "replicate"):
            data = {"strategy": strategy, **(options if strategy == "fsdp" else {})}
            engine = make_engine(data, sgd, model=Net())
            loop(engine, rank, between)
            assert all_equal(engine.model), name
            found[name][strategy] = close_whole(engine)
    return found


def test_trains_as_replicated_weights_do():
    for found in run_ranks(run, 2, timeout=120):
        for name, runs in found.items():
            for strategy in ("zero1", "fsdp"):
                torch.testing.assert_close(runs[strategy], runs["replicate"], rtol=0, atol=2e-6, msg=name)


def warm(rank, world_size):
    """The state of an optimizer that has taken steps before, given and then of the full model."""
    found = {}
    for strategy in ("zero1", "fsdp"):
        for mode in ("fp32", "naive_bf16"):
            expected = whole(make_engine("replicate", warm=2))
            found[strategy, mode] = whole(make_engine(strategy, warm=2, **MODES[mode])), expected
    return found


def test_state_of_an_optimizer_that_has_taken_steps():
    for found in run_ranks(warm, 2):
        for (weights, state, groups), (expected, others, names) in found.values():
            assert groups == names
            torch.testing.assert_close(state, others, rtol=0, atol=0)
            torch.testing.assert_close(weights, expected, rtol=0, atol=0, check_dtype=False)


def writes(rank, world_size, strategy):
    """What is written after an evaluation, in which gathered weights are kept, stays."""
    options = KEPT if strategy == "fsdp" else {}
    engine = make_engine({"strategy": strategy, **options}, sgd, model=Net())
    evaluate(engine, rank, 0)
    with torch.no_grad():
        for param in engine.model.parameters():
            param.fill_(0.25)
    return all(bool((value == 0.25).all()) for value in close_whole(engine).values())


def other_place(rank, world_size, strategy):
    """The state of another rank is rejected."""
    engine = make_engine(strategy)
    saved = engine.state_dict()
    assert {key: saved["layout"][key] for key in ("dp_rank", "dp_size")} == {"dp_rank": rank, "dp_size": 2}
    saved["layout"]["dp_rank"] = 1 - rank
    with pytest.raises(InputError, match=r"the state is from .*dp_rank [01].* but this rank is .*dp_rank [01]"):
        engine.load_state_dict(saved)


class SetsData(torch.optim.SGD):
    """As some optimizers do: `param.data = ...` in the step."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.data = param.data - 0.1 * param.grad


def load_after_a_step(rank, world_size, strategy):
    """Are the loaded weights those of the next forward, by what loads them?"""
    found = []
    for loads in ("engine", "model"):
        engine = halfmesh.initialize(
            here(nn.Linear(4, 4)),
            lambda params: SetsData(params, lr=0.1),
            nn.functional.mse_loss,
            config={"parallel": {"data": strategy}, "timeout": 30},
            device=rank_device(),
        )
        state = copy.deepcopy((engine if loads == "engine" else engine.model).state_dict())
        x = here(torch.ones(2, 4))
        wanted = engine(x).detach()
        engine.backward(engine.criterion(engine(x), x))
        engine.step()
        (engine if loads == "engine" else engine.model).load_state_dict(state)
        found.append(torch.equal(engine(x).detach(), wanted))
        engine.close()
    return found


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_what_is_written_and_loaded(strategy):
    assert all(run_ranks(writes, 2, strategy))
    run_ranks(other_place, 2, strategy)
    assert run_ranks(load_after_a_step, 2, strategy) == [[True, True]] * 2
