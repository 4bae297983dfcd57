"""Several data ranks: equal to torch DDP, and to each other whatever a loop or a model does; and what they send."""

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
    CLASSES,
    FEATURES,
    FP16_TORCH,
    MLP,
    adamw,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    said,
    summed_loss,
    train,
)
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed

PARAMETERS = sum(p.numel() for p in MLP().parameters())


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
    "DDP, with accumulation and `no_sync`",
    "bitwise torch's gradients, one reduction per update",
    of="PyTorch",
    page="loop.md",
)
def test_bitwise_equal_to_torch_ddp():
    assert run_ranks(against_ddp, 2) == [0.0, 0.0]


# -- what is sent ----------------------------------------------------------------------------------------------------


@dataclass
class Sent:
    """All-reduces that ran while other things were done: their count and bytes, and the most in flight at once."""

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


def reductions(rank: int, world_size: int) -> dict[Any, Sent]:
    """What an epoch of 8 batches sends by length of the cycle; and one batch, by option."""
    found: dict[Any, Sent] = {}
    for accumulation in (1, 4):
        engine = make_engine({"gradient_accumulation": accumulation}, loader=make_loader(world_size * 4 * 8, 4))
        with watched_reductions() as found[accumulation]:
            train(engine)
        engine.close()
    for name, data in OPTIONS.items():
        engine = make_engine({"parallel": {"data": data}})
        with watched_reductions() as found[name]:
            train(engine, max_batches=1)
        engine.close()
    return found


OPTIONS = {
    "bfloat16": {"reduce_dtype": "bfloat16"},
    "small buckets": {"bucket_mb": 0.0005},
    "one in flight": {"max_inflight": 1, "bucket_mb": 0.0001},
    "many in flight": {"max_inflight": 8, "bucket_mb": 0.0001},
}


@pytest.mark.promise("DDP, with accumulation and `no_sync`")
def test_what_is_reduced():
    """Once per update each number, with zeros up to the next multiple of 8, and a flag for each parameter; in buckets
    and formats as asked for."""
    sizes = [param.numel() for param in MLP().parameters()]
    padded = sum(-(-size // 8) * 8 for size in sizes)
    for found in run_ranks(reductions, 2):
        assert [found[accumulation].count for accumulation in (1, 4)] == [8, 2]
        for sent in (found[1], found[4]):
            assert 0 <= sent.bytes // sent.count - 4 * padded <= 4 * len(sizes)
        shape = {name: (found[name].count, round(found[name].bytes / PARAMETERS), found[name].most) for name in OPTIONS}
        assert shape["bfloat16"] == (1, 2, 1)
        assert shape["small buckets"][:2] == (4, 4)
        assert shape["one in flight"] == (9, 4, 1)
        assert shape["many in flight"] == (9, 4, 8)


# -- loops and models ------------------------------------------------------------------------------------------------


def two_backwards(rank: int, world_size: int) -> float:
    """How far two weighted losses before one step lead from a loss that is their sum."""
    weights = []
    x, y = (tensor[rank::2] for tensor in here(make_data(16)))
    for parts in (1, 2):
        engine = make_engine(FP16_TORCH | {"loss_reduction": "weighted"}, criterion=summed_loss)
        for _ in range(2):
            for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                engine.backward(engine.criterion(engine(inputs), targets))
            engine.step()
        weights.append(full_weights(engine))
        engine.close()
    return max((weights[0][n] - weights[1][n]).abs().max().item() for n in weights[0])


def test_two_backwards_before_a_step_are_reduced_together():
    assert max(run_ranks(two_backwards, 2)) < 2e-4


def outside_backward(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A backward that does not go through the engine, after the engine has reduced."""
    x, y = (tensor[rank::2] for tensor in here(make_data(16)))
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


def test_a_backward_outside_the_engine_is_reduced_or_rejected():
    (first, messages), (second, _) = run_ranks(outside_backward, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert difference(first, reference([make_data(16)], lambda p: torch.optim.SGD(p, lr=0.2))) < 1e-5
    assert all("a backward outside this engine added gradients" in message for message in messages)


class OneBranch(MLP):
    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(self.again(x) if use else x)


def frozen_within_a_cycle(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """A layer that rank 0 has used in the first microbatch of a cycle is frozen in the second."""
    engine = make_engine({"gradient_accumulation": 2}, model=OneBranch(), loader=make_loader(32, 4))
    for i, (x, y) in enumerate(engine.dataloader):
        engine.model.again.requires_grad_(i % 2 == 0)
        engine.backward(engine.criterion(engine(x, use=rank == 0 and i % 2 == 0), y))
        engine.step()
    return full_weights(engine)


def test_a_parameter_frozen_within_a_cycle_that_one_rank_had_used():
    first, second = run_ranks(frozen_within_a_cycle, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first["again.weight"], MLP().again.weight)


# -- what ranks have in common, and what not --------------------------------------------------------------------------


class OddBuffers(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expanded", torch.rand(1).expand(3, 4))
        self.register_buffer("eighth", torch.rand(3).to(torch.float8_e4m3fn))
        self.register_buffer("rotation", torch.rand(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.zeros(0))


def starts(rank: int, world_size: int) -> tuple[list[Any], list[str], torch.Tensor]:
    """The buffers; what is rejected; and what is dropped after a state that rank 0 saved, loaded by all."""
    torch.manual_seed(rank)
    model = OddBuffers()
    for name in ("expanded", "rotation"):
        buffer = model.get_buffer(name)
        buffer.data = buffer.data + rank
    make_engine(model=model).close()
    buffers = [torch.view_as_real(b) if b.is_complex() else b.float() for b in model.buffers()]
    sparse = MLP()
    sparse.register_buffer("s", torch.eye(2).to_sparse())
    rejected = [said(make_engine, model=sparse), said(make_engine, {"gradient_accumulation": 1 + rank})]
    engine = make_engine(optimizer=adamw, model=nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5)))
    states: list[Any] = [engine.state_dict()]
    dist.broadcast_object_list(states, src=0)
    engine.load_state_dict(states[0])
    return [buffer.tolist() for buffer in buffers], rejected, engine(here(torch.ones(16, FEATURES))) == 0


def test_ranks_start_with_equal_buffers_and_drop_differently():
    (first, rejected, dropped), (second, others, dropped_too) = run_ranks(starts, 2)
    assert first == second
    for sparse, configs in (rejected, others):
        assert "the buffers s are sparse" in sparse
        assert "the ranks have different configs" in configs
    assert not torch.equal(dropped, dropped_too)
