"""Hooks for `halfmesh.Trainer`, by class or, in a list of hooks, by name ("progress")."""

from .trainer.metrics import CheckpointHook, EarlyStopHook, LRSchedulerHook, MetricHook
from .trainer.profiling import MemorySnapshotHook, ProfileHook
from .trainer.records import MLflowHook, ProgressHook, RunHook, TensorBoardHook, WandbHook
from .trainer.throughput import MemoryHook, ThroughputHook

__all__ = [
    "CheckpointHook",
    "EarlyStopHook",
    "LRSchedulerHook",
    "MLflowHook",
    "MemoryHook",
    "MemorySnapshotHook",
    "MetricHook",
    "ProfileHook",
    "ProgressHook",
    "RunHook",
    "TensorBoardHook",
    "ThroughputHook",
    "WandbHook",
]
