"""The hooks of Colossal-AI's Trainer, by name and argument, as hooks of `halfmesh.Trainer`.

`priority` is taken and has no effect: hooks are called in the order of their list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .. import hooks as _hooks
from ..errors import InputError
from ..trainer.hook import Hook, Record
from ..trainer.outcome import Outcome

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..trainer.trainer import Trainer


class LossHook(Hook):
    """Does nothing: every record has the loss."""

    def __init__(self, priority: int = 0) -> None: ...


class AccuracyHook(Hook):
    """Evaluation's part of samples that are right, as "eval_accuracy", over all ranks.

    Args:
        accuracy_func: from outputs and targets to the number of samples that are right.
    """

    def __init__(self, accuracy_func: Callable[[Any, Any], Any], priority: int = 0) -> None:
        self._count = accuracy_func
        self._right = self._seen = 0

    def before_eval(self, trainer: Trainer) -> None:
        self._right = self._seen = 0

    def after_eval_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        if outcome.has_output:
            self._right += int(self._count(outcome.output, outcome.target))
            self._seen += len(outcome.target)

    def eval_results(self, trainer: Trainer) -> Mapping[str, float]:
        context = trainer.engine.context
        counts = context.is_last_stage and context.tp_rank == 0  # others have seen no outputs, or the same ones
        everyone = [one for one in context.everyone((self._right, self._seen) if counts else None) if one is not None]
        seen = sum(count for _, count in everyone)
        return {"eval_accuracy": sum(right for right, _ in everyone) / seen} if seen else {}


class LRSchedulerHook(Hook):
    """Advances a scheduler after each epoch, or each update. It is not one that the engine advances."""

    def __init__(self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1) -> None:
        self._scheduler, self._by_epoch = lr_scheduler, by_epoch

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if not self._by_epoch:
            self._scheduler.step()

    def after_epoch(self, trainer: Trainer) -> None:
        if self._by_epoch:
            self._scheduler.step()


class LogMetricByEpochHook(Hook):
    """Logs each record on rank 0."""

    def __init__(self, logger: Any = None, interval: int = 1, priority: int = 10) -> None:
        self._logger = logger

    def write(self, trainer: Trainer, record: Record) -> None:
        if trainer.engine.context.rank == 0:
            from ..log import get_logger

            line = ", ".join(f"{name} {value:.6g}" for name, value in record.items())
            (self._logger or get_logger()).info(line)


class LogMetricByStepHook(LogMetricByEpochHook):
    """The same."""

    def __init__(self, priority: int = 10) -> None:
        super().__init__()


def ThroughputHook(  # noqa: N802 - the name of theirs
    ignored_steps: int = 0, priority: int = 10, tflop_per_step: int = 0, use_local: bool = False
) -> Hook:
    """`halfmesh.hooks.ThroughputHook`; `tflop_per_step` is its `flops_per_sample`, in another unit: give it there."""
    if tflop_per_step:
        raise InputError(f"tflop_per_step={tflop_per_step!r}: use halfmesh.hooks.ThroughputHook(flops_per_sample=...)")
    return _hooks.ThroughputHook()


def LogMemoryByEpochHook(  # noqa: N802
    logger: Any = None, interval: int = 1, priority: int = 10, log_eval: bool = True, report_cpu: bool = False
) -> Hook:
    """`halfmesh.hooks.MemoryHook`."""
    return _hooks.MemoryHook()


def TensorboardHook(  # noqa: N802
    log_dir: str, ranks: Any = None, parallel_mode: Any = None, priority: int = 10
) -> Hook:
    """`halfmesh.hooks.TensorBoardHook`, which writes on rank 0."""
    return _hooks.TensorBoardHook(log_dir)


def SaveCheckpointHook(  # noqa: N802
    interval: int = 1,
    checkpoint_dir: str | None = None,
    model: Any = None,
    save_by_iter: bool = False,
    priority: int = 10,
) -> Hook:
    """`halfmesh.hooks.CheckpointHook`: with optimizer, loss scale and all, after each epoch or `interval` updates."""
    if checkpoint_dir is None:
        raise InputError("SaveCheckpointHook: checkpoint_dir is missing")
    if interval != 1 and not save_by_iter:
        raise InputError(f"interval={interval!r}: a checkpoint is saved after each epoch; or set save_by_iter=True")
    return _hooks.CheckpointHook(checkpoint_dir, every=interval if save_by_iter else None)


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"halfmesh.migration.colossalai has no hook {name!r}; those of halfmesh are in halfmesh.hooks: docs/trainer.md"
    )
