"""Saves the run every so often."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import InputError
from ..trainer.hook import Hook
from .monitor import Monitor

if TYPE_CHECKING:
    from ..amp.result import StepResult
    from ..trainer.trainer import Trainer


class CheckpointHook(Hook):
    """Saves a checkpoint every `every` updates, or after each epoch, and when `fit` is over.

    Args:
        directory: a folder that all ranks share.
        every: updates between two checkpoints; None: one after each epoch.
        keep: how many to leave there; None: all.
        in_background: training goes on while a checkpoint is written.
        monitor: a result of evaluation; the weights with the best one are in `directory/best.safetensors`.
        mode: whether less ("min") or more ("max") of it is better.
    """

    def __init__(
        self,
        directory: str | Path,
        every: int | None = None,
        keep: int | None = 3,
        in_background: bool = True,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if every is not None and every < 1:
            raise InputError(f"every={every!r}: expected a number of updates, 1 or more, or None (after each epoch)")
        self._directory = Path(directory)
        self._every, self._keep, self._in_background = every, keep, in_background
        self._monitor = None if monitor is None else Monitor(monitor, mode)
        self._saved_at = -1

    def before_fit(self, trainer: Trainer) -> None:
        self._saved_at = trainer.engine.global_step

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._every is not None and trainer.engine.global_step % self._every == 0:
            self._save(trainer, self._in_background)

    def after_epoch(self, trainer: Trainer) -> None:
        if self._every is None:
            self._save(trainer, self._in_background)

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        if self._monitor is not None and self._monitor.improves(results):
            trainer.engine.save_weights(self._directory / "best.safetensors")

    def after_fit(self, trainer: Trainer) -> None:
        self._save(trainer, in_background=False)
        trainer.engine.wait_for_save()

    def _save(self, trainer: Trainer, in_background: bool) -> None:
        if self._saved_at == trainer.engine.global_step:
            return
        self._saved_at = trainer.engine.global_step
        trainer.save(self._directory, keep=self._keep, in_background=in_background)
