"""Gradients that data ranks average: of layers that are used by all ranks, by some or by none, in any memory format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.support.proofs import Row, rows

pytestmark = pytest.mark.distributed


def sgd(params: Any) -> optim.Optimizer:
    """A parameter without a gradient stays as it is, one with a gradient of zero decays."""
    return optim.SGD(params, lr=0.1, weight_decay=0.1)


class Branches(nn.Module):
    """Layers beside each other, of which the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers[:used])


def branches() -> Any:
    """The first and the second rank use other layers, in each microbatch; in the third update no rank uses the last."""
    used = [4, 3, 4, 2, 3, 4, 2, 2, 3, 3, 2, 3]
    return Branches(), [(torch.randn(2, 4), count) for count in used]


def images() -> Any:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    return model, torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)


SMALL = {"parallel": {"data": {"bucket_mb": 1e-6}}}
"""A bucket for each parameter."""
ZERO1 = {"parallel": {"data": {"strategy": "zero1", "bucket_mb": 1e-6}}}


@rows(
    Row("layers that some ranks use", branches, {"gradient_accumulation": 2}, 2, sgd, updates=3, accumulated=True),
    Row("by buckets", branches, {"gradient_accumulation": 2, **SMALL}, 2, sgd, updates=3, accumulated=True),
    Row("by buckets, zero1", branches, {"gradient_accumulation": 2, **ZERO1}, 2, sgd, updates=3, accumulated=True),
    Row("channels last, zero1", images, {"parallel": {"data": {"strategy": "zero1", "bucket_mb": 1e-3}}}, 3, sgd),
)
def test_trains_as_one_process(row):
    row.prove()
