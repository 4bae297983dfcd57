"""Gradients and buffers of data ranks are averaged: overflows, errors, and what is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfmesh.config.load import load_config
from halfmesh.engine.parallelize import reduce_options
from tests.support.models import full_weights, make_engine, said
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed
TINY = {"parallel": {"data": {"bucket_mb": 1e-6}}}  # one bucket for each parameter


def sgd(params: Any) -> torch.optim.Optimizer:
    """One without a gradient stays as it is, one with a gradient of zero decays."""
    return torch.optim.SGD(params, lr=1.0, weight_decay=0.1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def half_precision(rank: int, world_size: int) -> dict[str, list[float]]:
    """fp16 gradients of 40000: their fp16 sum is inf."""
    found = {}
    for dtype in ("float32", "float16", "bfloat16"):
        config = {"fp16": {"mode": "naive", "initial_scale": 1.0}, "parallel": {"data": {"reduce_dtype": dtype}}}
        engine = make_engine(config, model=Scaled(), optimizer=sgd)
        engine.backward(engine(here(torch.full((4,), 40000.0))).float().sum())
        engine.step()
        found[dtype] = full_weights(engine)["weight"].tolist()
    return found


def test_half_precision_gradients_do_not_overflow():
    expected = {"float32": [-40000.0] * 4, "float16": [-40000.0] * 4, "bfloat16": [-39936.0] * 4}
    assert run_ranks(half_precision, 2) == [expected] * 2


class Codebook(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("constant", torch.ones(2))
        self.register_buffer("codes", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.add_(x.mean(0))
        return super().forward(x) * self.constant


def buffers(rank: int, world_size: int) -> tuple[list[float], int, str]:
    norm, texts = nn.BatchNorm1d(2), list[str]()
    engine = make_engine(model=nn.Sequential(norm, Codebook()))
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("halfmesh").addHandler(handler)
    for _ in range(3):
        engine.backward(engine(here(torch.full((4, 2), 10.0 * rank))).sum())
        engine.step()
    logging.getLogger("halfmesh").removeHandler(handler)
    return norm.running_mean.tolist(), int(norm.num_batches_tracked), "\n".join(texts)


def test_batchnorm_statistics_are_averaged_and_other_buffers_that_change_are_named_once():
    first, second = run_ranks(buffers, 2)
    assert first[:2] == second[:2]
    assert first[0] == pytest.approx([5 * (1 - 0.9**3)] * 2)  # towards the mean of 0 and 10
    assert first[2].count("the buffers 1.codes change during training on each data rank, so they may") == 1
    assert ("constant" in first[2], second[2]) == (False, "")


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = super().forward
        return checkpoint(run, checkpoint(run, x, use_reentrant=True), use_reentrant=True)


def broken_off(rank: int, world_size: int) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """What is said of a gradient that arrives twice; the weights after an update, and after one before which a backward
    fails on all ranks, once its first buckets were sent."""
    twice = make_engine(TINY, model=Twice(2, 2))
    message = said(twice.backward, twice(here(torch.ones(1, 2, requires_grad=True))).sum())
    found, x = [], here(torch.full((2, 4), float(rank + 1)))

    def fail(_: torch.Tensor) -> None:
        raise LookupError("no gradient")

    for fails in (False, True):
        torch.manual_seed(0)
        engine = make_engine(TINY, model=nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), optimizer=sgd)
        if fails:
            handle = engine.model[0].weight.register_hook(fail)
            with pytest.raises(LookupError):
                engine.backward(engine(x).sum() * 1e6)
            handle.remove()
            engine.zero_grad()
        engine.backward(engine(x).sum())
        engine.step()
        found.append(full_weights(engine))
    return message, found


def test_an_error_in_backward_leaves_nothing_behind():
    for message, (expected, found) in run_ranks(broken_off, 2):
        assert "changed after it was sent, by a backward inside the last one" in message
        assert "use_reentrant=False" in message
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("ranks", "given", "mib"), [(2, None, 25), (64, None, 64), (64, 25, 25)])
def test_buckets_grow_with_the_data_ranks(ranks, given, mib):
    """Under zero1 each of them gets 1 / ranks of a bucket."""
    config = load_config({"parallel": {"data": {"bucket_mb": given}}})
    assert reduce_options(config, config.parallel.dims(ranks)).bucket_bytes == mib * 2**20
