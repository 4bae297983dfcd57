"""A cell through the engine: what tests of overflows, and of keys that change no weights, train."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

import halfmesh
from tests.support.ranks import find_obstacle, rank_device, run_ranks

from .cells import NO_PIPE, Cell
from .workloads import SAMPLES, criterion, find_workload

MOMENTUM = 0.9


def make_optimizer(params: Any, lr: float) -> optim.Optimizer:
    return optim.SGD(params, lr=lr, momentum=MOMENTUM)


def make_engine(cell: Cell, rank: int, dropout: float = 0.0) -> halfmesh.Engine:
    """Each rank begins with other weights; rank 0's count."""
    workload = find_workload(cell.model)
    model = workload.build(seed=rank)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        if hasattr(module, "dropout"):
            module.dropout = dropout
    optimizer = make_optimizer(model.parameters(), workload.lr)
    loader = DataLoader(workload.dataset, SAMPLES // (cell.data * cell.gradient_accumulation))
    return halfmesh.initialize(model, optimizer, criterion, loader, cell.config(), device=rank_device())


def train(engine: halfmesh.Engine, updates: int) -> None:
    """So many updates."""
    for x, y in engine.dataloader:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        updates -= engine.step() is not None
        if not updates:
            return


def skip_obstacles(cell: Cell) -> None:
    """Skip the test where `cell` cannot run."""
    if obstacle := find_obstacle(cell.world_size, sends=cell.pipeline != NO_PIPE):
        pytest.skip(obstacle)


def run_cell(cell: Cell, job: Any, *args: Any, **options: Any) -> Any:
    """What `job` returns on the ranks of `cell`, where it can run."""
    skip_obstacles(cell)
    return run_ranks(job, cell.world_size, *args, **options)


def digest(weights: dict[str, torch.Tensor]) -> str:
    """A short text that is the same for the same bits."""
    hashed = hashlib.sha256()
    for name, value in weights.items():
        hashed.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        hashed.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
