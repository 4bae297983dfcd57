"""Keeps the best weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..report.run_files import replace_file
from ..trainer.hook import Hook
from .monitor import Monitor

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class CheckpointHook(Hook):
    """Keeps the weights with the best result of evaluation, as `directory/best.safetensors`; `best.json` has the result
    and its update. Checkpoints to resume from are saved by the config's key `checkpoint`.

    Args:
        directory: a folder that all ranks share.
        monitor: a result of evaluation.
        mode: whether less ("min") or more ("max") of it is better.
    """

    def __init__(self, directory: str | Path, monitor: str, mode: Literal["min", "max"] = "min") -> None:
        self._directory = Path(directory)
        self._monitor = Monitor(monitor, mode)
        self._best_is_known = False

    def state_dict(self) -> dict[str, Any]:
        return self._monitor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best_is_known = self._monitor.load_state_dict(state)

    def before_fit(self, trainer: Trainer) -> None:
        self._monitor.require(trainer, "CheckpointHook")
        self._monitor.best = self._read_best(trainer)

    def close(self, trainer: Trainer) -> None:
        self._best_is_known = False  # of this run

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        if not self._monitor.improves(results):
            return
        trainer.engine.save_weights(self._directory / "best.safetensors")
        if trainer.engine.context.rank == 0:
            best = {"step": trainer.engine.global_step, self._monitor.name: self._monitor.best}
            replace_file(self._directory / "best.json", json.dumps(best) + "\n")

    def _read_best(self, trainer: Trainer) -> float:
        """What the run that goes on had as its best; of a run that begins, or in another folder, there is none. The
        same on all ranks."""
        engine, monitor = trainer.engine, self._monitor
        best = monitor.worst
        if engine.context.rank == 0 and engine.global_step > 0:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads((self._directory / "best.json").read_text())
                value, step = float(found[monitor.name]), found["step"]
                if self._best_is_known:
                    best = monitor.best
                elif step <= engine.global_step:  # the checkpoint is older than this state, or of a plain loop
                    best = value
        return float(engine.context.from_first(best))
