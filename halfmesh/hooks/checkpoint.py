"""Saves the run every so often."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import refuse_below
from ..report.run_files import replace_file
from ..trainer.hook import Hook
from .monitor import Monitor

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class CheckpointHook(Hook):
    """Saves a checkpoint every `every` updates, or after each epoch and its evaluation, and when `fit` is over.

    Args:
        directory: a folder that all ranks share.
        every: updates between two checkpoints; None: one after each epoch.
        keep: how many to leave there; None: all.
        in_background: training goes on while a checkpoint is written.
        monitor: a result of evaluation; the weights with the best one are in `directory/best.safetensors`, and how good
            they are in `best.json`, from which a run that goes on knows it.
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
        refuse_below(1, every=every, keep=keep)
        self._directory = Path(directory)
        self._every, self._keep, self._in_background = every, keep, in_background
        self._monitor = None if monitor is None else Monitor(monitor, mode)
        self._saved_at = -1
        self._best_is_known = False

    def state_dict(self) -> dict[str, Any]:
        return {} if self._monitor is None else self._monitor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best_is_known = self._monitor is not None and self._monitor.load_state_dict(state)

    def before_fit(self, trainer: Trainer) -> None:
        self._saved_at = trainer.engine.global_step
        if self._monitor is not None:
            self._monitor.require(trainer, "CheckpointHook")
            self._monitor.best = self._read_best(trainer, self._monitor)

    def close(self, trainer: Trainer) -> None:
        self._best_is_known = False  # of this run

    def before_epoch(self, trainer: Trainer) -> None:
        # Not at the end of one: its evaluation, and what other hooks do then, belongs to what is saved.
        if self._every is None:
            self._save(trainer, self._in_background)
        else:
            self._save_if_due(trainer, self._every)

    def before_batch(self, trainer: Trainer, batch: Any) -> None:
        # Not right after the step: other hooks may have something to do then (a scheduler).
        if self._every is not None:
            self._save_if_due(trainer, self._every)

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        if self._monitor is None or not self._monitor.improves(results):
            return
        trainer.engine.save_weights(self._directory / "best.safetensors")
        if trainer.engine.context.rank == 0:
            best = {"step": trainer.engine.global_step, self._monitor.name: self._monitor.best}
            replace_file(self._directory / "best.json", json.dumps(best) + "\n")

    def after_fit(self, trainer: Trainer) -> None:
        self._save(trainer, in_background=False)
        trainer.engine.wait_for_save()

    def _save_if_due(self, trainer: Trainer, every: int) -> None:
        inside = trainer.result is None  # an accumulation cycle
        if not inside and trainer.engine.global_step % every == 0:
            self._save(trainer, self._in_background)

    def _save(self, trainer: Trainer, in_background: bool) -> None:
        if self._saved_at == trainer.engine.global_step:
            return
        self._saved_at = trainer.engine.global_step
        trainer.save(self._directory, keep=self._keep, in_background=in_background)

    def _read_best(self, trainer: Trainer, monitor: Monitor) -> float:
        """What the run that goes on had as its best; of a run that begins, or in another folder, there is none. The
        same on all ranks."""
        engine, best = trainer.engine, monitor.worst
        if engine.context.rank == 0 and engine.global_step > 0:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads((self._directory / "best.json").read_text())
                value, step = float(found[monitor.name]), found["step"]
                if self._best_is_known:
                    best = monitor.best
                elif step <= engine.global_step:  # the checkpoint is older than this state, or of a plain loop
                    best = value
        return float(engine.context.from_first(best))
