"""Models that faults are put into: without a fault of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.composition.workloads import MLP, criterion, find_workload

Given = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Callable[..., Any]]
"""What a builder returns: the model, inputs and targets to draw from, and the criterion."""


def given(name: str, model: nn.Module | None = None, loss: Callable[..., Any] = criterion) -> Given:
    """A workload, with another model or criterion."""
    workload = find_workload(name)
    return workload.make() if model is None else model, workload.data(), loss


class Between(MLP):
    """The MLP with code of its own: after `first`, and after `up`, whose features a tensor group shards."""

    def after_first(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def after_up(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.after_first(F.gelu(self.first(x)))
        x = self.norm(x + self.down(self.after_up(F.gelu(self.up(x)))))
        return self.head(F.gelu(self.again(x)))


def batch_norm() -> Given:
    """BatchNorm's statistics are those of each data rank's batch."""

    class Norm(Between):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

    return given("mlp", Norm())


def weighted() -> Given:
    """A criterion that returns the sum and the number of targets that count."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(output, target, ignore_index=0, reduction="sum"), (target != 0).sum()

    return given("mlp", loss=loss)


def three_heads() -> Given:
    """Heads that two context ranks cannot share, so that they gather keys and values."""
    from gpt import GPT

    return given("gpt", GPT(context=8, width=18, depth=2, num_heads=3))


def dropping() -> Given:
    """With dropout, which verify switches off."""
    from gpt import GPT

    return given("gpt", GPT(context=8, width=16, depth=2, num_heads=4, dropout=0.1))


def scaled_in_training() -> Given:
    """A block that computes something else in evaluation."""

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x) * (1.5 if self.training else 1.0))

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block(8, 8) for _ in range(3)), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    return given("mlp", Blocks())
