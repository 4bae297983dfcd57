"""One cell on one rank: six updates through the engine, and what came of them."""

from __future__ import annotations

import hashlib
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import halfmesh
from tests.support.models import MatmulDtypes
from tests.support.ranks import find_obstacle, rank_device, run_ranks

from .cells import NO_PIPE, Cell
from .workloads import SAMPLES, criterion, find_workload

OVERFLOW_AT = 1
"""The update in which one rank's loss is inf, where the loss is scaled: the last data rank's."""
MOMENTUM = 0.9


@dataclass(frozen=True)
class Step:
    """What an update says of itself. The same on every rank."""

    skipped: bool
    loss_scale: float
    grad_norm: float | None
    lr: float


@dataclass(frozen=True)
class Outcome:
    """What one rank saw.

    Attributes:
        losses: of its own microbatches.
        dtypes: of the matrix products in its second update.
        digest: of its whole weights, in the end.
        weights: these, from rank 0 only.
    """

    steps: list[Step]
    losses: list[float]
    dtypes: set[torch.dtype]
    digest: str
    weights: dict[str, torch.Tensor] | None


def decay(update: int) -> float:
    """A learning rate that every update which is taken changes."""
    return 0.95**update


def make_optimizer(params: Any, lr: float) -> optim.Optimizer:
    return optim.SGD(params, lr=lr, momentum=MOMENTUM)


def make_engine(cell: Cell, rank: int, **options: Any) -> halfmesh.Engine:
    """Each rank begins with other weights; rank 0's count. `options` are the mode's."""
    workload = find_workload(cell.model)
    model = workload.build(seed=rank)
    optimizer = make_optimizer(model.parameters(), workload.lr)
    loader = DataLoader(workload.dataset, SAMPLES // (cell.data * cell.gradient_accumulation))
    scheduler = LambdaLR(optimizer, decay)
    return halfmesh.initialize(
        model, optimizer, Criterion(), loader, cell.config(**options), lr_scheduler=scheduler, device=rank_device()
    )


class Criterion:
    """The workloads'.

    Attributes:
        factor: of the loss; inf where it is to overflow.
    """

    factor = 1.0

    def __call__(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        loss = criterion(output, target)
        return loss if self.factor == 1 else loss * self.factor


def train(rank: int, world_size: int, cell: Cell, watch: Any = None) -> Outcome:
    """The loop of the README. `watch` finds the dtypes of matrix products, if not MatmulDtypes."""
    engine = make_engine(cell, rank)
    watch = MatmulDtypes() if watch is None else watch
    steps: list[Step] = []
    losses: list[float] = []
    for x, y in engine.dataloader:
        overflows = cell.scaled and len(steps) == OVERFLOW_AT
        place = engine.context
        is_last = place.is_last_stage and (place.dp_rank, place.tp_rank) == (cell.data - 1, cell.tensor - 1)
        engine._parts.criterion.factor = math.inf if overflows and is_last else 1.0
        engine.zero_grad()
        # Not the first update, before which a plan of patterns is tried out in fp32. Backward: pipelines compute in it.
        with watch if len(steps) == 1 else nullcontext():
            output = engine(x)
            loss = engine.criterion(output, y)
            engine.backward(loss)
        if not overflows:
            losses.append(loss.item())
        result = engine.step()
        if result is not None:
            steps.append(Step(result.skipped, result.loss_scale, result.grad_norm, result.lr))
    engine.close(restore=True)
    weights = {name: value.detach().cpu().clone() for name, value in engine.model.state_dict().items()}
    return Outcome(steps, losses, watch.dtypes, digest(weights), weights if rank == 0 else None)


def run_cell(cell: Cell, job: Any, *args: Any, **options: Any) -> Any:
    """What `job` returns on the ranks of `cell`, where it can run."""
    if obstacle := find_obstacle(cell.world_size, sends=cell.pipeline != NO_PIPE):
        pytest.skip(obstacle)
    return run_ranks(job, cell.world_size, *args, **options)


def digest(weights: dict[str, torch.Tensor]) -> str:
    """A short text that is the same for the same bits."""
    hashed = hashlib.sha256()
    for name, value in weights.items():
        hashed.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        hashed.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
