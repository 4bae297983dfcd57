"""Hooks by name: "progress", or dict(type="run", directory=...)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..registry import Registry
from .hook import Hook


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
    "wandb": "writers:WandbHook",
    "mlflow": "writers:MLflowHook",
    "run": "run:RunHook",
}.items():
    HOOKS.register_lazy(_name, f"halfmesh.hooks.{_reference}")

HookLike = Hook | str | Mapping[str, Any]


def make_hooks(given: Sequence[HookLike]) -> list[Hook]:
    """The hooks that `given` names.

    Raises:
        RegistryError: no hook of that name. InputError: something else than a hook, or arguments that it does not take.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InputError(f"hooks={given!r}: expected a list, hooks={[] if given is None else [given]!r}")
    return [_make(hook) for hook in given]


def _make(given: HookLike) -> Hook:
    if isinstance(given, Hook):
        return given
    if isinstance(given, type) and issubclass(given, Hook):
        raise InputError(f"{given.__name__} is a class; give an object of it: {given.__name__}(...)")
    if isinstance(given, str):
        given = {"type": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise InputError(
            f"{given!r} is no hook: expected an object of halfmesh.Hook, a name ({', '.join(HOOKS.names())}), or "
            "dict(type=name, ...)"
        )
    options = {key: value for key, value in given.items() if key != "type"}
    made = HOOKS.get(given["type"])
    try:
        hook = made(**options)
    except TypeError as error:
        raise InputError(f"hook {given['type']!r}: {error}") from error
    if not isinstance(hook, Hook):
        raise InputError(f"hook {given['type']!r}: {type(hook).__name__} is no subclass of halfmesh.Hook")
    return hook
