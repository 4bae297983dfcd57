"""The full model of an engine that is sharded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import halfmesh


def close_whole(engine: halfmesh.Engine) -> dict[str, Any]:
    """The full model's weights, on the CPU of every rank. The engine is closed."""
    weights = engine.full_state_dict(rank0_only=False)
    engine.close()
    return weights


def load_full(full: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load what `full_state_dict(optimizer=True)` returned into a plain model and its optimizer."""
    model.load_state_dict(full["model"])
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(full["optimizer"]))
