"""The base class of hooks, and hooks by name: "progress", or dict(type="run", directory=...)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..amp.step_result import StepResult
from ..errors import InputError, did_you_mean, show
from ..utils.registry import Registry
from .batch import Outcome

Trainer = Any
"""The `halfmesh.Trainer` that calls the hook. Its file imports this one, so its type is not named here; your hooks may
annotate it."""

Record = dict[str, Any]
"""Numbers by name: "step", "epoch", and measured values."""


class Hook:
    """Base class; every method is a no-op. Hooks are called in the order in which you pass them to `fit`.

    All ranks call all hooks at the same points, so a hook may use collectives. A decision (`trainer.stop`) must be the
    same on all ranks. Reading a tensor synchronizes with the device: do it in `measure`.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """The state to resume this hook: plain values and tensors, saved with each checkpoint. Ranks call it
        independently: no collectives here."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Called before `before_fit` with the state from the checkpoint, or from the end of the last `fit`. Hooks are
        matched by class name, several of one class by their order. If the layout changed, it is rank 0's state."""

    def before_fit(self, trainer: Trainer) -> None:
        """Called when training begins, or resumes."""

    def after_fit(self, trainer: Trainer) -> None:
        """Called when training ends without an error."""

    def close(self, trainer: Trainer) -> None:
        """The last call, even after an error: release what `before_fit` or `before_eval` acquired."""

    def before_epoch(self, trainer: Trainer) -> None:
        """Called when the epoch `trainer.epoch` begins."""

    def after_epoch(self, trainer: Trainer) -> None:
        """Called after all batches of the epoch, before evaluation. Not called if the epoch was stopped early."""

    def before_batch(self, trainer: Trainer, batch: Any) -> None:
        """Called with the next batch to train on."""

    def after_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        """Called after backward and `engine.step` of a batch."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Called after the update of an accumulation cycle, which may have been skipped."""

    def before_eval(self, trainer: Trainer) -> None:
        """Called when an evaluation begins, in `fit` or in `evaluate`. The model is in evaluation mode."""

    def after_eval_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        """Called after each batch. Data ranks may have different numbers of batches: no collectives here."""

    def eval_results(self, trainer: Trainer) -> Mapping[str, float]:
        """This hook's results of the evaluation; the same on all ranks."""
        return {}

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        """Called with the results of an evaluation, of all hooks."""

    def before_save(self, trainer: Trainer) -> None:
        """Called before `trainer.save` saves a checkpoint."""

    def after_save(self, trainer: Trainer, path: Path) -> None:
        """Called after a checkpoint was saved to `path`, or its save in the background has begun."""

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        """Values to add to the record, every `log_every` updates and at the end of an epoch."""
        return {}

    def write(self, trainer: Trainer, record: Record) -> None:
        """Called with a complete record, of training or of an evaluation (whose names begin with "eval_")."""


def add_measured(record: Record, hook: Hook, method: str, given: Mapping[str, Any]) -> None:
    """Add `given`, the result of a `method` of `hook`, to `record`.

    Raises:
        InputError: a name is in the record already, so one value would hide the other.
    """
    if twice := [key for key in given if key in record]:
        raise InputError(
            f"{type(hook).__name__}.{method} returned {', '.join(map(repr, twice))}, which the record already has; "
            "rename the metric, or remove a hook that is listed twice"
        )
    record.update(given)


# -- hooks by name ---------------------------------------------------------------------------------------------------


HOOKS: Registry[Any] = Registry("hook", "halfmesh.hooks")
for _name, _class in {
    "metric": "MetricHook",
    "lr_scheduler": "LRSchedulerHook",
    "progress": "ProgressHook",
    "throughput": "ThroughputHook",
    "memory": "MemoryHook",
    "checkpoint": "CheckpointHook",
    "early_stop": "EarlyStopHook",
    "tensorboard": "TensorBoardHook",
    "wandb": "WandbHook",
    "mlflow": "MLflowHook",
    "run": "RunHook",
    "profile": "ProfileHook",
    "memory_snapshot": "MemorySnapshotHook",
}.items():
    HOOKS.register_lazy(_name, f"halfmesh.hooks:{_class}")

HookLike = Hook | str | Mapping[str, Any]


def make_hook(given: HookLike) -> Hook:
    """The hook itself, or a new one by its name.

    Raises:
        RegistryError: no hook of that name. InputError: not a hook, or its arguments are wrong.
    """
    if isinstance(given, Hook):
        return given
    options = {"type": given} if isinstance(given, str) else given
    if not isinstance(options, Mapping) or "type" not in options:
        raise InputError(
            f"{given!r} is not a hook: expected an object of a subclass of halfmesh.Hook (not the class), a name "
            f"({', '.join(HOOKS.names())}), or dict(type=name, ...)"
        )
    name = options["type"]
    kind, arguments = HOOKS.get(name), {key: value for key, value in options.items() if key != "type"}
    _check_arguments(name, inspect.signature(kind).parameters, arguments)
    try:
        made: Hook = kind(**arguments)
    except TypeError as error:
        raise InputError(f"hook {name!r} with {show(arguments)}: {error}") from error
    return made


def _check_arguments(name: str, known: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    """Raise InputError if an argument is unknown or missing."""
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return
    problems = [
        f"{key}={show(value)} is not one of its arguments{did_you_mean(key, known)}"
        for key, value in given.items()
        if key not in known
    ]
    problems += [f"{key} is missing" for key, one in known.items() if one.default is one.empty and key not in given]
    if problems:
        raise InputError(f"hook {name!r} takes {', '.join(known) or 'no arguments'}: {'; '.join(problems)}")
