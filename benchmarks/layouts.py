"""The loops of several processes: torch's own tools put together by hand, accelerate, and halfmesh."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfmesh

from .contenders import LR, Setup, adamw, forward_of, functional_adamw
from .harness import AGAIN, BARE, FUSED, HALFMESH, LOOP, Contender
from .peers import ACCELERATE, imported

LayoutFactory = Callable[..., Contender]
REPLICATED = "halfmesh, replicated weights"
SERIAL = "halfmesh, nothing overlapped"


def make_ddp(setup: Setup, accumulation: int, name: str = LOOP, **flags: Any) -> Contender:
    """DDP; with accumulation, no_sync() around all backwards but the last."""
    model = DistributedDataParallel(setup.model())
    optimizer = adamw(model, **flags)
    x, y, criterion, dtype = setup.x, setup.y, setup.work.criterion, setup.dtype

    def forward() -> torch.Tensor:
        if dtype is None:
            return criterion(model(x), y)
        with torch.autocast("cpu", dtype):
            return criterion(model(x), y)

    def one() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        optimizer.step()
        return loss

    def several() -> torch.Tensor:
        optimizer.zero_grad()
        for number in range(accumulation):
            with contextlib.nullcontext() if number == accumulation - 1 else model.no_sync():
                loss = forward()
                (loss / accumulation).backward()
        optimizer.step()
        return loss

    return Contender(name, one if accumulation == 1 else several, model, optimizer)


def make_bare(setup: Setup, accumulation: int) -> Contender:
    """The least that replicas can do: the gradients of all batches in one buffer, one all-reduce of that, and the fused
    kernel, which divides. Nothing is looked up, checked, counted, reported or overlapped."""
    model = setup.model()
    forward, params = forward_of(setup, model), list(model.parameters())
    update = functional_adamw(params)
    flat = torch.zeros(sum(param.numel() for param in params))
    for param, piece in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = piece.view_as(param)
    grads = [param.grad for param in params]
    divisor = torch.tensor(float(dist.get_world_size() * accumulation))

    def step() -> torch.Tensor:
        flat.zero_()
        for _ in range(accumulation):
            loss = forward()
            loss.backward()
        dist.all_reduce(flat)
        update(grads, divisor)
        return loss

    return Contender(BARE, step, model, note="nothing is checked, counted, reported or overlapped")


def make_accelerate(setup: Setup, accumulation: int) -> Contender:
    accelerate = imported("accelerate")
    mixed = setup.precision if setup.dtype is not None else "no"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=accumulation)
    plain = setup.model()
    model, optimizer = accelerator.prepare(plain, adamw(plain))
    if not isinstance(model, DistributedDataParallel):
        raise RuntimeError("it did not recognise the group of processes")
    x, y, criterion = setup.x, setup.y, setup.work.criterion

    def step() -> torch.Tensor:
        for _ in range(accumulation):
            with accelerator.accumulate(model):
                loss = criterion(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def close() -> None:
        accelerate.state.AcceleratorState._reset_state()  # but not the group of processes
        accelerate.state.GradientState._reset_state()

    return Contender(ACCELERATE, step, model, optimizer.optimizer, close=close)


def make_zero(setup: Setup, name: str = LOOP, **flags: Any) -> Contender:
    """DDP with ZeroRedundancyOptimizer, which is torch's ZeRO of stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(setup.model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, **flags)
    x, y, criterion = setup.x, setup.y, setup.work.criterion

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Contender(name, step, model, optimizer)


def make_fsdp(setup: Setup, name: str = LOOP, **flags: Any) -> Contender:
    """`fully_shard` of each block, and of the model."""
    from torch.distributed.fsdp import fully_shard

    model = setup.model()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        if hasattr(block, "attention"):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model, **flags)
    x, y, criterion = setup.x, setup.y, setup.work.criterion

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Contender(name, step, model, optimizer)


def make_tensor(setup: Setup, name: str = LOOP, fused: bool = False) -> Contender:
    """`parallelize_module`, with the plan of a transformer that torch's tutorials have."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    model = setup.model()
    for block, module in model.named_children():
        if hasattr(module, "attention"):
            plan |= {f"{block}.attention.qkv": ColwiseParallel(), f"{block}.attention.out": RowwiseParallel()}
            plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, plan)
    divided = [param for param in model.parameters() if isinstance(param, DTensor)]
    whole = [param for param in model.parameters() if not isinstance(param, DTensor)]
    groups: list[dict[str, Any]] = [{"params": divided}, {"params": whole}]  # fused kernels refuse both in one list
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=fused or None)
    x, y, criterion = setup.x, setup.y, setup.work.criterion

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Contender(name, step, model, optimizer)


def make_pipeline(setup: Setup, microbatches: int, name: str = LOOP, **flags: Any) -> Contender:
    """torch.distributed.pipelining: a stage of half the blocks on each rank, and its schedule 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    whole = setup.model()
    assert isinstance(whole, nn.Sequential)
    layers = list(whole)
    cut = 1 + (len(layers) - 3) // 2  # an embedding before the blocks, norm and head behind them
    model = nn.Sequential(*(layers[:cut] if rank == 0 else layers[cut:]))
    optimizer = adamw(model, **flags)
    stage = PipelineStage(model, rank, size, setup.device)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=setup.work.criterion)
    x, y = setup.x, setup.y
    told = torch.zeros(())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        # As of halfmesh, every rank gets the loss.
        told.copy_(torch.stack(losses).mean().detach() if losses else torch.zeros(()))
        dist.broadcast(told, size - 1)
        return told

    return Contender(name, step, model, optimizer)


def make_halfmesh(setup: Setup, accumulation: int = 1, **parallel: Any) -> Contender:
    model = setup.work.model()
    config: dict[str, Any] = {"gradient_accumulation": accumulation, "parallel": parallel}
    if setup.dtype is not None:
        config[setup.precision] = {"mode": "torch"}
    engine = halfmesh.initialize(model, adamw(model), setup.work.criterion, config=config, device="cpu")
    x, y = setup.x, setup.y

    def step() -> torch.Tensor:
        for _ in range(accumulation):
            engine.zero_grad()
            loss: torch.Tensor = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
        return loss

    return Contender(HALFMESH, step, engine.model, engine.optimizer, engine=engine)


def make_halfmesh_tensor(setup: Setup) -> Contender:
    # Blocks only, as by hand: embedding and head stay whole.
    plan = {"*.attention": "heads()", "*.attention.qkv": "colwise", "*.attention.out": "rowwise"}
    plan |= {"*.up": "colwise", "*.down": "rowwise"}
    return make_halfmesh(setup, tensor={"size": 2, "plan": plan})


def make_halfmesh_pipeline(setup: Setup, microbatches: int) -> Contender:
    return make_halfmesh(setup, pipeline={"size": 2, "microbatches": microbatches})


def make_halfmesh_sharded(
    setup: Setup, name: str, strategy: str, overlap: bool = True, bucket_mb: float = 1.0
) -> Contender:
    contender = make_halfmesh(setup, data={"strategy": strategy, "bucket_mb": bucket_mb})
    if not overlap:
        engine = contender.engine
        reducer, slices = engine._accumulation.reducer, engine._division.slices
        begin = reducer.open
        reducer.open = lambda last: begin(False)  # all is sent after backward
        slices.stepped = lambda shards: slices._stepped.update(map(id, shards))  # and gathered after the update
    return dataclasses.replace(contender, name=name)


def _named(make: Callable[..., Contender], name: str, **flags: Any) -> LayoutFactory:
    return lambda setup, **options: make(setup, name=name, **options, **flags)


DATA: list[tuple[str, LayoutFactory]] = [
    (LOOP, make_ddp),
    (AGAIN, _named(make_ddp, AGAIN)),
    (FUSED, _named(make_ddp, FUSED, fused=True)),
    (HALFMESH, make_halfmesh),
    (BARE, make_bare),
    (ACCELERATE, make_accelerate),
]
TENSOR: list[tuple[str, LayoutFactory]] = [
    (LOOP, make_tensor),
    (AGAIN, _named(make_tensor, AGAIN)),
    (FUSED, _named(make_tensor, FUSED, fused=True)),
    (HALFMESH, make_halfmesh_tensor),
]
ZERO: list[tuple[str, LayoutFactory]] = [
    (LOOP, make_zero),
    (AGAIN, _named(make_zero, AGAIN)),
    (FUSED, _named(make_zero, FUSED, fused=True)),
    (HALFMESH, _named(make_halfmesh_sharded, HALFMESH, strategy="zero1")),
    (SERIAL, _named(make_halfmesh_sharded, SERIAL, strategy="zero1", overlap=False)),
    (REPLICATED, _named(make_halfmesh_sharded, REPLICATED, strategy="replicate")),
]
FSDP: list[tuple[str, LayoutFactory]] = [
    (LOOP, make_fsdp),
    (AGAIN, _named(make_fsdp, AGAIN)),
    (FUSED, _named(make_fsdp, FUSED, fused=True)),
    (HALFMESH, _named(make_halfmesh_sharded, HALFMESH, strategy="fsdp")),
    (REPLICATED, _named(make_halfmesh_sharded, REPLICATED, strategy="replicate")),
]
PIPELINE: list[tuple[str, LayoutFactory]] = [
    (LOOP, make_pipeline),
    (AGAIN, _named(make_pipeline, AGAIN)),
    (FUSED, _named(make_pipeline, FUSED, fused=True)),
    (HALFMESH, make_halfmesh_pipeline),
]
