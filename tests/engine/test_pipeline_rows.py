"""Models that mix the rows of a batch are refused before the first update of a pipeline; of others nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfmesh.parallel.pipeline.partition import resolve
from tests.support.models import CLASSES, FEATURES, make_data, said
from tests.support.pipeline_parts import make, pipe, step
from tests.support.ranks import here, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


class Does(nn.Module):
    def __init__(self, how: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(x, self.training)


class Counts(nn.Module):
    """Adds how often it was called, in a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.calls += 1
        return x + 0.1 * self.calls * self.number


MIXED: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Does(lambda x, training: (x @ x.T).softmax(-1) @ x),
    "mean": lambda: Does(lambda x, training: x - x.mean(0)),
    "softmax": lambda: Does(lambda x, training: x.softmax(0)),
    "in training": lambda: Does(lambda x, training: x / x.std(0) if training else x),
    "with dropout": lambda: nn.Sequential(nn.Dropout(), Does(lambda x, training: F.normalize(x, dim=0))),
    "with noise": lambda: Does(lambda x, training: F.dropout(x, 0.5, training) - x.mean(0)),
    "capacity": lambda: Does(lambda x, training: x * (torch.arange(len(x), device=x.device) < 3)[:, None]),
}
OWN: dict[str, Callable[[], nn.Module]] = {
    "dropout": nn.Dropout,
    "function": lambda: Does(lambda x, training: F.dropout(x, 0.5, training)),
    "noise": lambda: Does(lambda x, training: x + torch.randn_like(x)),
    "batch_norm": lambda: nn.BatchNorm1d(16),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
    "counts": Counts,
    "half": lambda: Does(lambda x, training: x.bfloat16().float()),
}


def deep(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), *between, nn.Linear(16, CLASSES))


def train(rank: int, world_size: int) -> dict[str, Any]:
    x, y = here(make_data(8))
    found: dict[str, Any] = {}
    for name, layer in MIXED.items():
        found[name] = said(step, make(pipe(microbatches=4), deep(layer())), x, y)
    for name, layer in OWN.items():
        engine = make(pipe(microbatches=4), deep(layer()))
        step(engine, x, y)
        found[name] = {name: value for name, value in engine.model.state_dict().items() if "weight" not in name}
        assert all(module.training for module in engine.model.modules())
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(train, 2)


@pytest.mark.parametrize("name", MIXED)
def test_mixed_rows_are_refused(name, ranks):
    for found in ranks:
        assert "computes other outputs for the first 2 microbatches together than one by one" in found[name]
        assert "The first module whose output differs is 2" in found[name]


@pytest.mark.parametrize("name", OWN)
def test_rows_by_themselves_are_trained(name, ranks):
    state = ranks[0][name] | ranks[1][name]
    if name == "batch_norm":
        assert state["2.num_batches_tracked"] == 4
    if name == "counts":
        assert state["2.calls"] == 4


def test_gradients_by_frequency():
    model = nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Linear(4, 4))
    _, problems = resolve(model, 2, 1)
    assert problems == [
        "0: scale_grad_by_freq divides gradients by how often an index is in the batch, but a pipeline computes them "
        "for each microbatch; build the embedding with scale_grad_by_freq=False"
    ]
