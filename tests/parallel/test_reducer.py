"""Gradients of data ranks are averaged exactly: in any dtype and layout, used by all ranks, by some or by none."""

from __future__ import annotations

import logging
import logging.handlers
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


def make_conv() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2))
    return model.double().to(memory_format=torch.channels_last)


def images(rank: int) -> torch.Tensor:
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return x.to(memory_format=torch.channels_last)


def convolve(rank: int, world_size: int) -> list[torch.Tensor]:
    engine = make_engine(model=make_conv(), optimizer=sgd)
    engine.backward(engine(here(images(rank))).square().mean())
    engine.step()
    return [param.detach() for param in engine.model.parameters()]


def test_double_precision_and_channels_last():
    model = make_conv()
    optimizer = sgd(model.parameters())
    (sum(model(images(rank)).square().mean() for rank in range(2)) / 2).backward()
    optimizer.step()
    for found in run_ranks(convolve, 2):
        torch.testing.assert_close(found, [param.detach() for param in model.parameters()], rtol=1e-13, atol=1e-13)


class Branches(nn.Module):
    """Layers beside each other, of which some may be used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers[:used])


UPDATES = ((4, 4), (4, 3), (3, 3), (4, 4))  # how many layers rank 0 uses, and rank 1


def samples(rank: int, microbatch: int) -> torch.Tensor:
    return torch.full((2, 4), float(rank + 1 + microbatch))


def use_some(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    engine = make_engine({"gradient_accumulation": 2}, model=Branches(), optimizer=sgd)
    for number, used in enumerate(UPDATES):
        engine.model.layers[0].requires_grad_(number > 1)
        for microbatch in range(2):
            engine.backward(engine(here(samples(rank, microbatch)), used[rank]).square().mean() / 10)
            engine.step()
    return full_weights(engine)


def test_frozen_layers_and_layers_that_some_ranks_or_none_use():
    model = Branches()
    optimizer = sgd(model.parameters())
    for number, used in enumerate(UPDATES):
        optimizer.zero_grad()
        model.layers[0].requires_grad_(number > 1)
        cells = ((rank, microbatch) for rank in range(2) for microbatch in range(2))
        (sum(model(samples(*cell), used[cell[0]]).square().mean() / 10 for cell in cells) / 4).backward()
        optimizer.step()
    first, second = run_ranks(use_some, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, model.state_dict(), rtol=1e-5, atol=1e-6)


class Codebook(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("constant", torch.ones(2))
        self.register_buffer("codes", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.add_(x.mean(0))
        return super().forward(x) * self.constant


def buffers(rank: int, world_size: int) -> tuple[list[float], int, str]:
    norm = nn.BatchNorm1d(2)
    engine = make_engine(model=nn.Sequential(norm, Codebook()))
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("halfmesh").addHandler(handler)
    for number in range(3):
        engine.backward(engine(here(torch.full((4, 2), 10.0 * rank))).sum())
        engine.step()
        if number == 0:
            statistics = norm.running_mean.tolist(), int(norm.num_batches_tracked)
    logging.getLogger("halfmesh").removeHandler(handler)
    return *statistics, "\n".join(record.getMessage() for record in handler.buffer)


def test_batchnorm_statistics_are_averaged_and_other_buffers_that_change_are_named_once():
    first, second = run_ranks(buffers, 2)
    assert first[:2] == second[:2] == ([0.5, 0.5], 1)  # the mean of 0 and 0.1 * 10
    assert first[2].count("the buffers 1.codes change during training, on each data rank from its own batches") == 1
    assert "constant" not in first[2]
    assert second[2] == ""


def double(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Running statistics, and sums over ranks that are summed once more."""
    norm = nn.BatchNorm1d(2).double()
    engine = make_engine(model=norm, optimizer=sgd)
    engine.backward(engine(here(torch.full((4, 2), rank / 3, dtype=torch.float64))).sum())
    engine.step()
    twice = make_engine({"loss_reduction": "sum"}, model=Scaled().double(), optimizer=sgd)
    for _ in range(2):
        twice.backward(twice(here(torch.ones(4, dtype=torch.float64))).sum() / 7)
    twice.step()
    return norm.running_mean.cpu(), twice.model.weight.detach().cpu()


def test_statistics_and_sums_in_float64_stay_in_float64():
    for mean, weight in run_ranks(double, 3):
        torch.testing.assert_close(mean, torch.full((2,), 0.1 / 3, dtype=torch.float64), rtol=1e-14, atol=0)
        torch.testing.assert_close(weight, torch.full((4,), -6 / 7, dtype=torch.float64), rtol=1e-14, atol=0)


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = super().forward
        return checkpoint(run, checkpoint(run, x, use_reentrant=True), use_reentrant=True)


def arrives_twice(rank: int, world_size: int) -> str:
    twice = make_engine(TINY, model=Twice(2, 2))
    output = twice(here(torch.ones(1, 2, requires_grad=True))).sum()
    return said(twice.backward, output)


def test_a_gradient_that_arrives_after_it_was_sent_is_refused():
    for reentrant in run_ranks(arrives_twice, 2):
        assert "arrived twice in one backward" in reentrant
        assert "use_reentrant=False" in reentrant


def make_chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


def broken_off(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """A backward fails on all ranks after its first buckets were sent; the next one is complete."""
    engine = make_engine(TINY, model=make_chain(), optimizer=sgd)

    def fail(_: torch.Tensor) -> None:
        raise LookupError("no gradient")

    handle = engine.model[0].weight.register_hook(fail)
    with pytest.raises(LookupError):
        engine.backward(engine(here(samples(rank, 0))).sum() * 1e6)
    handle.remove()
    engine.zero_grad()
    engine.backward(engine(here(samples(rank, 0))).sum())
    engine.step()
    return full_weights(engine)


def test_an_error_in_backward_leaves_nothing_behind():
    model = make_chain()
    optimizer = sgd(model.parameters())
    (sum(model(samples(rank, 0)).sum() for rank in range(2)) / 2).backward()
    optimizer.step()
    for found in run_ranks(broken_off, 2):
        torch.testing.assert_close(found, model.state_dict())


@pytest.mark.parametrize(("ranks", "given", "mib"), [(2, None, 25), (64, None, 64), (64, 25, 25)])
def test_buckets_grow_with_the_data_ranks(ranks, given, mib):
    """Under zero1 each of them gets 1 / ranks of a bucket."""
    config = load_config({"parallel": {"data": {"bucket_mb": given}}})
    assert reduce_options(config, config.parallel.dims(ranks)).bucket_bytes == mib * 2**20
