"""`debug="sync"`: ranks that train alike are left alone, and of others the first thing that differs is named."""

from __future__ import annotations

import math

import pytest
import torch
from checkpoint_runs import LAYOUTS, MLP_POINTS, TENSOR, make_engine
from dist_harness import run_ranks
from torch import nn

from halfmesh.errors import SyncError

PIPE = {"size": 2, "microbatches": 2, "partition": MLP_POINTS[2]}
HYBRID = {"strategy": "fsdp", "hybrid": 2}
MORE = {
    "pp2_dp2": (4, {"pipeline": PIPE}),
    "pp2_tp2": (4, {"pipeline": PIPE, "tensor": TENSOR}),
    "tp2_dp2": (4, {"tensor": TENSOR}),
    "hybrid": (4, {"data": HYBRID}),
}
TIED = {"size": 2, "microbatches": 2, "partition": "by_blocks"}


@pytest.fixture(scope="module", autouse=True)
def layouts():
    """More of them than checkpoints are tested with."""
    LAYOUTS.update(MORE)
    yield
    for name in MORE:
        del LAYOUTS[name]


def start(layout, mode="none", **config):
    LAYOUTS.update(MORE)
    return make_engine(layout, mode, debug="sync", samples=64, clip_grad_norm=1.0, **config)


def train(engine, steps, before=lambda number, engine, x: x, factor=lambda number: 1.0):
    """`before` a batch may do harm, and change it."""
    number = 0
    while number < steps:
        for x, y in engine.dataloader:
            x = before(number, engine, x)
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            number += 1
            if number == steps:
                return


class Overflows(nn.Module):
    """Cross entropy, inf in the third call of four."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        loss = nn.functional.cross_entropy(output, target)
        return loss * math.inf if self.calls % 8 == 5 else loss


def clean_cells(rank, world_size, cells):
    found = []
    for layout, mode in cells:
        engine = start(layout, mode, dropout=0.2, shuffle=True, gradient_accumulation=2 if mode == "torch" else 1)
        engine._criterion = Overflows()
        train(engine, 8)
        found.append(engine._update.watch.skipped > 0)
        engine.close()
    return found
