"""Gradient norms of each type are one process's, with what several ranks or layers share counted once."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader

import halfmesh
from tests.support.ranks import here, rank_device, run_ranks

from .cells import Cell, Pipe
from .training import make_optimizer, run_cell
from .workloads import SAMPLES, criterion, find_workload

pytestmark = pytest.mark.distributed

UPDATES = 3
SEQUENCE = {"tensor": 2, "data": 2, "sequence_parallel": True}
SHARED = {"tensor": 2, "pipeline": Pipe(2, "1f1b", 2)}  # of a weight that both stages hold
CASES = [
    *((Cell("none", "gpt", **SHARED), kind) for kind in (2.0, 3.0, math.inf)),
    (Cell("none", "llama", **SEQUENCE), 3.0),
]
FURTHER = [
    (Cell("none", "mlp", tensor=2, data=2), 2.0),
    *((Cell("none", "gpt", **SEQUENCE), kind) for kind in (2.0, math.inf)),
    (Cell("none", "vit", **SEQUENCE), 2.0),
    (Cell("none", "llama", **SHARED), math.inf),
]


def measured(rank: int, world_size: int, cell: Cell, norm_type: float) -> list[float]:
    workload = find_workload(cell.model)
    model = workload.build()
    optimizer = make_optimizer(model.parameters(), workload.lr)
    config = cell.config() | {"clip_grad_norm": {"max_norm": 1e6, "norm_type": norm_type}}
    loader = DataLoader(workload.dataset, SAMPLES // cell.data)
    engine = halfmesh.initialize(model, optimizer, criterion, loader, config, device=rank_device())
    norms = []
    for x, y in engine.dataloader:
        engine.backward(engine.criterion(engine(x), y))
        norms.append(engine.step().grad_norm)
        if len(norms) == UPDATES:
            break
    engine.close()
    return norms


def expected(rank: int, world_size: int, name: str, norm_type: float) -> list[float]:
    workload = find_workload(name)
    model = here(workload.build())
    optimizer = make_optimizer(model.parameters(), workload.lr)
    x, y = here(workload.data())
    norms = []
    for inputs, targets in list(zip(x.split(SAMPLES), y.split(SAMPLES), strict=True))[:UPDATES]:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        grads = torch.cat([param.grad.flatten().double() for param in model.parameters()])
        norms.append(torch.linalg.vector_norm(grads, norm_type).item())
        optimizer.step()
    return norms


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in FURTHER)],
    ids=lambda case: f"{case[0]}-norm{case[1]:g}",
)
def test_norm_is_one_processs(case):
    cell, norm_type = case
    results = run_cell(cell, measured, cell, norm_type)
    assert all(norms == results[0] for norms in results)
    assert results[0] == pytest.approx(run_ranks(expected, 1, cell.model, norm_type)[0], rel=1e-6)
