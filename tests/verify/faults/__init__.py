"""Faults on purpose, and what `halfmesh verify` has to say of each: `corpus` has the list."""

from __future__ import annotations

import torch


def trains() -> bool:
    """Whether gradients are wanted. The engine tries plans out without: they miss what is wrong in training only."""
    return torch.is_grad_enabled()
