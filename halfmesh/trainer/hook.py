"""What a hook may do, and when; and hooks by name: "progress", or dict(type="run", directory=...)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..amp.step_result import StepResult
from ..errors import InputError, show
from ..registry import Registry
from .batch import Outcome

Trainer = Any
"""The `halfmesh.Trainer` that calls the hook. Its file imports this one, so its type is not named here; a hook of yours
may annotate it."""

Record = dict[str, Any]
"""Numbers by name, at one moment of a run: "step", "epoch", and what was measured."""


class Hook:
    """Base class: everything is a no-op. Hooks are called in the order in which they were given to `fit`.

    All ranks call all hooks at the same moments, so that a hook may talk to the other ranks; what it decides
    (`trainer.stop`) has to be the same on all of them. Reading a tensor waits for the device: do so in `measure`.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """What this hook has to know when the run goes on: plain values and tensors, saved with every checkpoint of the
        engine. Called on each rank by itself: no collectives here."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before `before_fit`, the state of this hook (of the class of this name, in the same place among those) when
        the run was saved, or when its last `fit` was over. In another layout it is that of rank 0."""

    def before_fit(self, trainer: Trainer) -> None:
        """Training begins; of a run that was loaded, it goes on."""

    def after_fit(self, trainer: Trainer) -> None:
        """Training is over, and no error has ended it."""

    def close(self, trainer: Trainer) -> None:
        """The last call, also after an error: give back what `before_fit` or `before_eval` took."""

    def before_epoch(self, trainer: Trainer) -> None:
        """The epoch `trainer.epoch` begins."""

    def after_epoch(self, trainer: Trainer) -> None:
        """All batches of the epoch were trained on. Evaluation follows. Not of an epoch that was left early."""

    def before_batch(self, trainer: Trainer, batch: Any) -> None:
        """`batch`, one of the dataloader's, is trained on next."""

    def after_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        """Backward and `engine.step` have run with a batch."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """An update was taken, or skipped: the last batch of an accumulation cycle was trained on."""

    def before_eval(self, trainer: Trainer) -> None:
        """An evaluation begins, within `fit` or by itself. The model is in evaluation mode."""

    def after_eval_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        """A batch was evaluated. Data ranks may have different numbers of them: no collectives here."""

    def eval_results(self, trainer: Trainer) -> Mapping[str, float]:
        """What this hook has to say about the evaluation that ends; the same on all ranks."""
        return {}

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        """The results of an evaluation, of all hooks."""

    def before_save(self, trainer: Trainer) -> None:
        """A checkpoint is about to be saved by `trainer.save`."""

    def after_save(self, trainer: Trainer, path: Path) -> None:
        """`path` was saved, or is being saved in the background."""

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        """What this hook adds to the record of this moment: every `log_every` updates and at the end of an epoch."""
        return {}

    def write(self, trainer: Trainer, record: Record) -> None:
        """A record is complete: of training, or of an evaluation, whose names begin with "eval_"."""


def add_measured(record: Record, hook: Hook, method: str, given: Mapping[str, Any]) -> None:
    """Add what a `method` of `hook` has returned to `record`.

    Raises:
        InputError: it is no dict, because a `return` was forgotten; or it has a name that is in the record already,
            which would hide a number.
    """
    name = f"{type(hook).__name__}.{method}"
    if not isinstance(given, Mapping):
        raise InputError(f"{name} returned {show(given)}; it has to return a dict of values by name, or {{}}")
    if twice := [key for key in given if key in record]:
        raise InputError(
            f"{name} gives {', '.join(map(repr, twice))}, which the record has already; give it another name (of a "
            "metric, or of a hook that is there twice)"
        )
    record.update(given)


# -- hooks by name ---------------------------------------------------------------------------------------------------


def _no_hook(obj: Any) -> str | None:
    if not callable(obj):
        return f"{obj!r} makes no hook; expected a subclass of halfmesh.Hook, or a function that returns one"
    return None


HOOKS: Registry[Any] = Registry("hook", "halfmesh.hooks", _no_hook)
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
}.items():
    HOOKS.register_lazy(_name, f"halfmesh.hooks:{_class}")

HookLike = Hook | str | Mapping[str, Any]


def make_hooks(given: Sequence[HookLike]) -> list[Hook]:
    """The hooks that `given` names.

    Raises:
        RegistryError: no hook of that name. InputError: something else than a hook, or arguments that it does not take.
    """
    if isinstance(given, (Hook, str, Mapping)):
        raise InputError(f"hooks={given!r}: expected a list, hooks={[given]!r}")
    return [_make(hook) for hook in given]


def _make(given: HookLike) -> Hook:
    if isinstance(given, Hook):
        return given
    options = {"type": given} if isinstance(given, str) else given
    if not isinstance(options, Mapping) or "type" not in options:
        raise InputError(
            f"{given!r} is no hook: expected an object of a subclass of halfmesh.Hook (not the class), a name "
            f"({', '.join(HOOKS.names())}), or dict(type=name, ...)"
        )
    made = HOOKS.get(options["type"])
    try:
        hook: Hook = made(**{key: value for key, value in options.items() if key != "type"})
    except TypeError as error:
        raise InputError(f"hook {options['type']!r}: {error}") from error
    return hook
