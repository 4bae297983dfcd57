"""Two ranks: halfmesh beside what torch has for the same layout, and accelerate, all in the same two processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .contenders import LR, Setup, adamw, make_halfmesh
from .harness import AGAIN, FUSED, HALFMESH, LOOP, Contender, Makers
from .peers import ACCELERATE, make_accelerate

RANKS = 2


def make_ddp(setup: Setup, name: str, accumulation: int = 1, **flags: Any) -> Contender:
    """DDP, with no_sync() around all backwards of an update but the last."""
    model = DistributedDataParallel(setup.model())
    optimizer = adamw(model, **flags)
    forward = setup.forward(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        for number in range(accumulation):
            with contextlib.nullcontext() if number == accumulation - 1 else model.no_sync():
                loss = forward()
                (loss / accumulation if accumulation > 1 else loss).backward()
        optimizer.step()
        return loss

    return Contender(name, step, model, optimizer)


def make_zero(setup: Setup, name: str, **flags: Any) -> Contender:
    """DDP with ZeroRedundancyOptimizer, torch's ZeRO of stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(setup.model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, **flags)
    return _ordinary(setup, name, model, optimizer)


def make_fsdp(setup: Setup, name: str, **flags: Any) -> Contender:
    """`fully_shard` of each block, and of the model."""
    from torch.distributed.fsdp import fully_shard

    model = setup.model()
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for block in model.children():
        if hasattr(block, "attention"):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _ordinary(setup, name, model, adamw(model, **flags))


def make_tensor(setup: Setup, name: str, fused: bool = False) -> Contender:
    """`parallelize_module`, with the plan of a transformer that torch's tutorials have."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    model = setup.model()
    for block, module in model.named_children():
        if hasattr(module, "attention"):
            plan |= {f"{block}.attention.qkv": ColwiseParallel(), f"{block}.attention.out": RowwiseParallel()}
            plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
    parallelize_module(model, dist.init_device_mesh("cpu", (RANKS,)), plan)
    divided = [param for param in model.parameters() if isinstance(param, DTensor)]
    whole = [param for param in model.parameters() if not isinstance(param, DTensor)]
    groups: list[dict[str, Any]] = [{"params": divided}, {"params": whole}]  # fused kernels reject both in one list
    return _ordinary(setup, name, model, torch.optim.AdamW(groups, lr=LR, fused=fused or None))


def _ordinary(setup: Setup, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Contender:
    forward = setup.forward(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        optimizer.step()
        return loss

    return Contender(name, step, model, optimizer)


def make_pipeline(setup: Setup, name: str, **flags: Any) -> Contender:
    """torch.distributed.pipelining: a stage of half the blocks on each rank, and its schedule 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    layers = list(setup.model().children())
    cut = 1 + (len(layers) - 3) // 2  # an embedding before the blocks, norm and head behind them
    model = nn.Sequential(*(layers[:cut] if rank == 0 else layers[cut:]))
    optimizer = adamw(model, **flags)
    stage = PipelineStage(model, rank, RANKS, setup.device)
    schedule = Schedule1F1B(stage, 4, loss_fn=setup.work.criterion)
    x, y = setup.x, setup.y
    everywhere = torch.zeros(())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        # As of halfmesh, every rank gets the loss.
        everywhere.copy_(torch.stack(losses).mean().detach() if losses else torch.zeros(()))
        dist.broadcast(everywhere, RANKS - 1)
        return everywhere

    return Contender(name, step, model, optimizer)


# Blocks only, as by hand: embedding and head stay whole.
TENSOR_PLAN = {"*.attention": "heads()", "*.attention.qkv": "colwise", "*.attention.out": "rowwise"}
TENSOR_PLAN |= {"*.up": "colwise", "*.down": "rowwise"}

# The loop by hand, halfmesh's config, whether each rank has a batch of its own, and the peers.
LAYOUTS: dict[str, tuple[Callable[..., Contender], dict[str, Any], bool, list[tuple[str, Any]]]] = {
    "DDP": (make_ddp, {}, True, [(ACCELERATE, make_accelerate)]),
    "DDP, 4 batches an update": (
        partial(make_ddp, accumulation=4),
        {"gradient_accumulation": 4},
        True,
        [(ACCELERATE, partial(make_accelerate, accumulation=4))],
    ),
    "zero1": (make_zero, {"parallel": {"data": {"strategy": "zero1", "bucket_mb": 1.0}}}, True, []),
    "fsdp": (make_fsdp, {"parallel": {"data": "fsdp"}}, True, []),
    "tensor": (make_tensor, {"parallel": {"tensor": {"size": 2, "plan": TENSOR_PLAN}}}, False, []),
    "pipeline": (make_pipeline, {"parallel": {"pipeline": {"size": 2, "microbatches": 4}}}, False, []),
}


def makers(layout: str, setup: Setup) -> Makers:
    """All contenders of a layout, the default loop first."""
    by_hand, config, _, peers = LAYOUTS[layout]
    return [
        (LOOP, lambda: by_hand(setup, LOOP)),
        (AGAIN, lambda: by_hand(setup, AGAIN)),
        (FUSED, lambda: by_hand(setup, FUSED, fused=True)),
        (HALFMESH, lambda: make_halfmesh(setup, **config)),
        *((name, partial(make, setup)) for name, make in peers),
    ]
