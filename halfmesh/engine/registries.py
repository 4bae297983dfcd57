"""The registry of the engine room."""

from __future__ import annotations

from typing import Any

from ..registry import Registry


def _no_hook(obj: Any) -> str | None:
    if not callable(obj):
        return f"{obj!r} makes no hook; expected a subclass of halfmesh.Hook, or a function that returns one"
    return None


HOOKS: Registry[Any] = Registry("hook", "halfmesh.hooks", _no_hook)
for _name, _reference in {
    "metric": "metrics:MetricHook",
    "lr_scheduler": "lr_scheduler:LRSchedulerHook",
    "progress": "progress:ProgressHook",
    "throughput": "throughput:ThroughputHook",
    "memory": "memory:MemoryHook",
    "checkpoint": "checkpoint:CheckpointHook",
    "early_stop": "early_stop:EarlyStopHook",
    "tensorboard": "writers:TensorBoardHook",
    "csv": "writers:CSVHook",
    "jsonl": "writers:JSONLHook",
    "run": "run:RunHook",
}.items():
    HOOKS.register_lazy(_name, f"halfmesh.hooks.{_reference}")
