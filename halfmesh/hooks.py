"""Hooks for `halfmesh.Trainer`, by class or, in a list of hooks, by name ("progress")."""

from .trainer.metrics import MetricHook
from .trainer.monitors import CheckpointHook, EarlyStopHook, LRSchedulerHook
from .trainer.progress import ProgressHook
from .trainer.run import RunHook
from .trainer.throughput import MemoryHook, ThroughputHook
from .trainer.writers import MLflowHook, TensorBoardHook, WandbHook

__all__ = [
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
