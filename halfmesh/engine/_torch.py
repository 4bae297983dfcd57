"""Private names of torch that several files of engine need."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader


def is_in_backward() -> bool:
    """Whether a backward runs and calls this: from a hook, or where activations are computed again."""
    return bool(torch._C._current_graph_task_id() != -1)


def without_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A shallow copy of `loader` that starts workers of its own, where `loader` keeps some (persistent_workers)."""
    clone = copy.copy(loader)
    clone._iterator = None
    return clone
