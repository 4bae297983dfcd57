"""Hooks for `halfmesh.Trainer`, by class or, in a list of hooks, by name ("progress")."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import CheckpointHook
    from .early_stop import EarlyStopHook
    from .lr_scheduler import LRSchedulerHook
    from .memory import MemoryHook
    from .metrics import MetricHook
    from .progress import ProgressHook
    from .run import RunHook
    from .throughput import ThroughputHook
    from .writers import MLflowHook, TensorBoardHook, WandbHook

_MODULE_OF = {
    "CheckpointHook": "checkpoint",
    "EarlyStopHook": "early_stop",
    "LRSchedulerHook": "lr_scheduler",
    "MemoryHook": "memory",
    "MetricHook": "metrics",
    "ProgressHook": "progress",
    "RunHook": "run",
    "ThroughputHook": "throughput",
    "MLflowHook": "writers",
    "TensorBoardHook": "writers",
    "WandbHook": "writers",
}

__all__ = [  # found by `__getattr__`
    "CheckpointHook",
    "EarlyStopHook",
    "LRSchedulerHook",
    "MLflowHook",
    "MemoryHook",
    "MetricHook",
    "ProgressHook",
    "RunHook",
    "TensorBoardHook",
    "ThroughputHook",
    "WandbHook",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from ..errors import did_you_mean

        raise AttributeError(f"module 'halfmesh.hooks' has no attribute {name!r}{did_you_mean(name, __all__)}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
