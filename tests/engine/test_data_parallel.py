"""Several data ranks: equal to one process on the joined batch, equal to torch DDP, equal to each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import (
    FP16_TORCH,
    MLP,
    MODES,
    TOLERANCES,
    adamw,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    said,
    train,
)
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed

PARAMETERS = sum(p.numel() for p in MLP().parameters())


def joined(batches: int, size: int, world_size: int, accumulation: int = 1) -> list:
    """The batches of one process that sees what all ranks see together."""
    x, y = make_data(batches * size * world_size)
    return list(zip(x.split(size * world_size * accumulation), y.split(size * world_size * accumulation), strict=True))


def parity(rank: int, world_size: int, modes: list[str], accumulation: int) -> dict[str, Any]:
    """The scale grows, clipping bites, the last cycle is short."""
    results = {}
    for mode in modes:
        growing = {"growth_interval": 2} if "fp16" in mode else {}
        config = {key: {**value, **growing} for key, value in MODES[mode].items()}
        config |= {"gradient_accumulation": accumulation, "clip_grad_norm": 0.7}
        engine = make_engine(config, loader=make_loader(world_size * 4 * 7, 4), model=MLP(seed=rank))
        if rank != 0:  # weights must have come from rank 0
            torch.testing.assert_close(engine.model.first.bias, MLP().first.bias.to(engine.model.first.bias))
        steps = [(r.skipped, r.grad_norm, r.loss_scale, r.lr) for r in train(engine) if r is not None]
        results[mode] = full_weights(engine), steps
        engine.close()
    return results


@pytest.mark.parametrize(
    ("world_size", "accumulation", "modes"), [(2, 2, list(MODES)), (3, 1, ["none", "torch_bf16", "naive_fp16"])]
)
def test_equals_one_process_on_the_joined_batch(world_size, accumulation, modes):
    results = run_ranks(parity, world_size, modes, accumulation)
    expected = reference(joined(7, 4, world_size, accumulation), max_norm=0.7)
    for mode, (weights, steps) in results[0].items():
        for other in results[1:]:
            assert other[mode][1] == steps, mode
            torch.testing.assert_close(other[mode][0], weights, rtol=0, atol=0)
        assert difference(weights, expected) < TOLERANCES[mode], mode


def against_ddp(rank: int, world_size: int) -> float:
    engine = make_engine(optimizer=adamw, loader=make_loader(64, 4))
    train(engine)
    ddp = DistributedDataParallel(here(MLP()))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)
    x, y = here(make_data(64))
    for begin in range(0, 64, 4 * world_size):
        part = slice(begin + rank, begin + 4 * world_size, world_size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x[part]), y[part]).backward()
        optimizer.step()
    return difference(full_weights(engine), ddp.module)


@pytest.mark.promise(
    "DDP",
    "bitwise the gradients of torch's",
    of="PyTorch",
    page="loop.md",
)
def test_bitwise_equal_to_torch_ddp():
    assert run_ranks(against_ddp, 2) == [0.0, 0.0]


@dataclass
class Sent:
    """What was handed to all-reduces that run while other things are done.

    Attributes:
        count, bytes: of them.
        most: in flight at once.
    """

    count: int = 0
    bytes: int = 0
    most: int = 0
    now: int = 0


@contextmanager
def watched_reductions() -> Iterator[Sent]:
    sent, all_reduce = Sent(), dist.all_reduce

    class Work:
        def __init__(self, inner: dist.Work) -> None:
            self.inner = inner

        def wait(self) -> None:
            sent.now -= 1
            self.inner.wait()

    def watched(tensor: torch.Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
        work = all_reduce(tensor, *args, async_op=async_op, **options)
        if not async_op:
            return work
        sent.count, sent.bytes, sent.now = sent.count + 1, sent.bytes + tensor.nbytes, sent.now + 1
        sent.most = max(sent.most, sent.now)
        return Work(work)

    with mock.patch("torch.distributed.all_reduce", watched):
        yield sent


def reductions(rank: int, world_size: int) -> dict[int, Sent]:
    counts = {}
    for accumulation in (1, 4):
        engine = make_engine({"gradient_accumulation": accumulation}, loader=make_loader(world_size * 4 * 8, 4))
        with watched_reductions() as counts[accumulation]:
            train(engine)
        engine.close()
    return counts


@pytest.mark.promise(
    "DDP with accumulation and `no_sync`",
    "one reduction per update",
    of="PyTorch",
    page="benchmarks.md",
)
def test_one_reduction_per_update():
    for counts in run_ranks(reductions, 2):
        assert {accumulation: sent.count for accumulation, sent in counts.items()} == {1: 8, 4: 2}
        for sent in counts.values():  # each number once, and a flag for each parameter
            assert 0 <= sent.bytes // sent.count - 4 * PARAMETERS <= 4 * len(list(MLP().parameters()))


OPTIONS = {
    "bfloat16": {"reduce_dtype": "bfloat16"},
    "small buckets": {"bucket_mb": 0.0005},
    "one in flight": {"max_inflight": 1, "bucket_mb": 0.0001},
    "many in flight": {"max_inflight": 8, "bucket_mb": 0.0001},
}


def data_options(rank: int, world_size: int) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name, data in OPTIONS.items():
        engine = make_engine({"parallel": {"data": data}})
        with watched_reductions() as sent:
            train(engine, max_batches=1)
        found[name] = sent.count, round(sent.bytes / PARAMETERS), sent.most
        engine.close()
    return found


@pytest.mark.promise(
    "a limit to collectives in flight",
    "`max_inflight`",
    of="SageMaker",
    page="sharding.md",
)
def test_options_of_the_reduction_have_an_effect():
    for found in run_ranks(data_options, 2):
        assert found["bfloat16"] == (1, 2, 1)
        assert found["small buckets"][:2] == (4, 4)
        assert found["one in flight"] == (9, 4, 1)
        assert found["many in flight"] == (9, 4, 8)


def two_backwards(rank: int, world_size: int) -> list:
    """Two losses, one step: as one loss that is their sum, in every reduction."""
    found = []
    for reduction in ("mean", "sum", "weighted"):
        weights = []
        for parts in (1, 2):
            engine = make_engine(
                FP16_TORCH | {"loss_reduction": reduction},
                criterion=lambda o, t: nn.functional.cross_entropy(o, t, reduction="sum") / 4,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            )
            x, y = here(make_data(16))
            x, y = x[rank::2], y[rank::2]
            for _ in range(2):
                for half in (slice(0, 8),) if parts == 1 else (slice(0, 4), slice(4, 8)):
                    loss = engine.criterion(engine(x[half]), y[half])
                    engine.backward((loss, 2.0 / parts) if reduction == "weighted" else loss)
                engine.step()
            weights.append(full_weights(engine))
            engine.close()
        found.append(max((weights[0][n] - weights[1][n]).abs().max().item() for n in weights[0]))
    return found


def test_two_backwards_before_a_step_in_every_reduction():
    for differences in run_ranks(two_backwards, 2):
        assert max(differences) < 2e-4


def outside_backward(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A backward that does not go through the engine, after the engine has reduced."""
    x, y = here(make_data(16))
    x, y = x[rank::2], y[rank::2]
    engine = make_engine(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    engine.backward(engine.criterion(engine(x), y))
    nn.functional.cross_entropy(engine.model(x), y).backward()
    engine.step()
    weights = full_weights(engine)
    engine.close()
    engine = make_engine({"loss_reduction": "sum"})
    engine.backward(engine.criterion(engine(x), y))
    nn.functional.cross_entropy(engine.model(x), y).backward()
    return weights, [said(engine.backward, engine.criterion(engine(x), y)), said(engine.step)]


def test_a_backward_outside_the_engine_is_reduced_or_refused():
    (first, messages), (second, _) = run_ranks(outside_backward, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    expected = reference([make_data(16)], lambda p: torch.optim.SGD(p, lr=0.2))
    assert difference(first, expected) < 1e-5
    assert all("gradients were added by a backward outside this engine" in message for message in messages)


def with_hooks(rank: int, world_size: int) -> dict[str, Any]:
    """Hooks that divide each gradient by 4, registered before or after initialize."""
    found = {}
    for data in ("replicate", "zero1"):
        for when in ("before", "after"):
            model = MLP()
            if when == "before":
                _divide_gradients(model)
            engine = make_engine({"parallel": {"data": data}}, model=model, loader=make_loader(32, 4))
            if when == "after":
                _divide_gradients(model)
            train(engine)
            found[f"{data} {when}"] = full_weights(engine)
            engine.close()
    return found


def _divide_gradients(model: nn.Module) -> None:
    def hook(param: nn.Parameter) -> None:
        param.grad.div_(4)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


def test_hooks_on_gradients_take_effect_whenever_they_were_registered():
    model = MLP()
    _divide_gradients(model)
    expected = reference(joined(4, 4, 2), model=model)
    for found in run_ranks(with_hooks, 2):
        for case, weights in found.items():
            assert difference(weights, expected) < 1e-6, case
