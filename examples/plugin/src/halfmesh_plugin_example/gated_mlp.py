"""A layer, and how a tensor group shards it wherever it is used: `plan="auto"` takes every plan that is registered."""

from __future__ import annotations

import torch
from torch import nn

from halfmesh import LayerPlan


class GatedMLP(nn.Module):
    """[..., width] to the same.

    Args:
        hidden: features in between. Tensor parallelism shards them, so the number of its ranks has to divide `hidden`.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return output


PLAN = LayerPlan(layers=(GatedMLP,), styles={"gate": "colwise", "up": "colwise", "down": "rowwise"})
