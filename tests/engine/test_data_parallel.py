"""Several data ranks: equal to torch DDP, and to each other whatever a loop or a model does; and what they send."""

from __future__ import annotations

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
    MLP,
    adamw,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    said,
    train,
)
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed


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


def reductions(rank: int, world_size: int) -> list[list[int]]:
    """The bytes of each all-reduce in an epoch of 8 batches, by config."""
    found, all_reduce = [], dist.all_reduce
    for config in ({}, {"gradient_accumulation": 4}, {"parallel": {"data": {"reduce_dtype": "bfloat16"}}}):
        engine = make_engine(config, loader=make_loader(world_size * 4 * 8, 4))
        sizes: list[int] = []

        def watched(tensor: torch.Tensor, *args: Any, sizes: Any = sizes, **options: Any) -> Any:
            sizes.extend([tensor.nbytes] * options.get("async_op", False))
            return all_reduce(tensor, *args, **options)

        with mock.patch("torch.distributed.all_reduce", watched):
            train(engine)
        found.append(sizes)
        engine.close()
    return found


@pytest.mark.promise("DDP, with accumulation and `no_sync`")
def test_what_is_reduced():
    """Once per update each number, with zeros up to the next multiple of 8, and a flag for each parameter."""
    sizes = [param.numel() for param in MLP().parameters()]
    padded = sum(-(-size // 8) * 8 for size in sizes)
    for each, accumulated, half in run_ranks(reductions, 2):
        assert [len(each), len(accumulated), len(half)] == [8, 2, 8]
        assert all(0 <= nbytes - 4 * padded <= 4 * len(sizes) for nbytes in (*each, *accumulated))
        assert all(0 <= nbytes - 2 * padded <= 2 * len(sizes) for nbytes in half)


# -- loops and models ------------------------------------------------------------------------------------------------


# -- what ranks have in common, and what not --------------------------------------------------------------------------


class OddBuffers(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expanded", torch.rand(1).expand(3, 4))
        self.register_buffer("eighth", torch.rand(3).to(torch.float8_e4m3fn))
        self.register_buffer("rotation", torch.rand(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.zeros(0))


def starts(rank: int, world_size: int) -> tuple[list[Any], str, torch.Tensor]:
    """The buffers; what is rejected; and what is dropped after a state that rank 0 saved, loaded by all."""
    torch.manual_seed(rank)
    model = OddBuffers()
    make_engine(model=model).close()
    buffers = [torch.view_as_real(b) if b.is_complex() else b.float() for b in model.buffers()]
    rejected = said(make_engine, {"gradient_accumulation": 1 + rank})
    engine = make_engine(optimizer=adamw, model=nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5)))
    states: list[Any] = [engine.state_dict()]
    dist.broadcast_object_list(states, src=0)
    engine.load_state_dict(states[0])
    return [buffer.tolist() for buffer in buffers], rejected, engine(here(torch.ones(16, FEATURES))) == 0


def test_ranks_start_with_equal_buffers_and_drop_differently():
    (first, rejected, dropped), (second, others, dropped_too) = run_ranks(starts, 2)
    assert first == second
    assert "the ranks have different configs" in rejected == others
    assert not torch.equal(dropped, dropped_too)
