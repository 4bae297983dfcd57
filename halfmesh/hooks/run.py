"""Keeps what a run was in a folder, for `halfmesh report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..report.folder import RunFolder
from ..trainer.hook import Hook, Record

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..trainer.trainer import Trainer


class RunHook(Hook):
    """Writes config, plan, records and skipped updates into a folder: `halfmesh.RunFolder` for a Trainer.

    To have them in the records, too, give `fit` the hooks "throughput" and "memory".

    Args:
        directory: the folder; see RunFolder for what happens if it is there.
        precision_report: keep `engine.precision_report()` of the last batch, too.
    """

    def __init__(self, directory: str | Path, precision_report: bool = False) -> None:
        self._directory = Path(directory)
        self._wants_precision = precision_report
        self._run: RunFolder | None = None

    def before_fit(self, trainer: Trainer) -> None:
        self._run = RunFolder(trainer.engine, self._directory)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._run is not None:
            self._run.note(result)

    def before_save(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.flush()

    def write(self, trainer: Trainer, record: Record) -> None:
        if self._run is not None:
            self._run.write(record)

    def after_fit(self, trainer: Trainer) -> None:
        if self._run is not None and self._wants_precision:
            self._run.save_precision_report()

    def close(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.close(sys.exception())
            self._run = None
