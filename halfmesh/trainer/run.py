"""Records a run in a folder, for `halfmesh report`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.folder import RunFolder
from .hook import Hook, Record

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..debug.precision import PrecisionReport
    from .trainer import Trainer


class RunHook(Hook):
    """Writes config, plan, records and skipped updates to a folder: `halfmesh.RunFolder` for a Trainer.

    The hooks "throughput" and "memory" add their values to the records.

    Args:
        directory: the folder; see RunFolder if it exists.
        precision_report: measure `engine.precision_report()` in the first update of each epoch, and keep the last one.
    """

    def __init__(self, directory: str | Path, precision_report: bool = False) -> None:
        self._directory = Path(directory)
        self._wants_precision = precision_report
        self._run: RunFolder | None = None
        self._is_due = False
        self._measuring = ExitStack()
        self._report: PrecisionReport | None = None

    def before_fit(self, trainer: Trainer) -> None:
        self._run = RunFolder(trainer.engine, self._directory)

    def before_epoch(self, trainer: Trainer) -> None:
        self._is_due = self._wants_precision

    def before_batch(self, trainer: Trainer, batch: Any) -> None:
        if self._is_due:
            self._is_due = False
            self._report = self._measuring.enter_context(trainer.engine.precision_report())

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._run is None:
            return
        self._run.note(result)
        if self._report is not None:
            self._measuring.close()  # fills it
            self._run.save_precision_report(self._report)
            self._report = None

    def before_save(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.flush()

    def write(self, trainer: Trainer, record: Record) -> None:
        if self._run is not None:
            self._run.write(record)

    def close(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.close(sys.exception())
            self._run = None
        error = sys.exception()
        self._measuring.__exit__(type(error) if error else None, error, None)
        self._report = None
