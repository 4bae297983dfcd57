"""Loops that could train otherwise under zero1 and fsdp than with replicated weights, which are the oracle."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.sharding.runs import Net, all_equal, batch, make_engine
from tests.support.ranks import run_ranks
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
    "kept, and a forward before the step": (look_ahead, KEPT),
    "frozen and unfrozen": (freeze, {}),
    "two losses": (twice, {}),
}
"""What happens between backward and step, and options of fsdp."""


def run(rank, world_size):
    """The weights by program and strategy."""
    found = {}
    for name, (between, options) in PROGRAMS.items():
        found[name] = {}
        for strategy in ("zero1", "fsdp", "replicate"):
            data = {"strategy": strategy, **(options if strategy == "fsdp" else {})}
            engine = make_engine(data, sgd, model=Net())
            for step in range(4):
                engine.zero_grad()
                x, y = batch(rank, step)
                engine.backward(engine.criterion(engine(x), y))
                between(engine, rank, step)
                engine.step()
            assert all_equal(engine.model), name
            found[name][strategy] = close_whole(engine)
    for strategy, options in (("zero1", {}), ("fsdp", KEPT)):
        engine = make_engine({"strategy": strategy, **options}, sgd, model=Net())
        evaluate(engine, rank, 0)
        with torch.no_grad():
            for param in engine.model.parameters():
                param.fill_(0.25)
        assert all(bool((value == 0.25).all()) for value in close_whole(engine).values()), "what is written stays"
    return found


def test_trains_as_replicated_weights_do():
    for found in run_ranks(run, 2, timeout=120):
        for name, runs in found.items():
            for strategy in ("zero1", "fsdp"):
                torch.testing.assert_close(runs[strategy], runs["replicate"], rtol=0, atol=2e-6, msg=name)
