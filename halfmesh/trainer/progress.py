"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..utils.log import get_logger
from .hook import Hook, Record

if TYPE_CHECKING:
    from .batch import Outcome
    from .trainer import Trainer

_log = get_logger(__name__)


class ProgressHook(Hook):
    """Shows records on rank 0: a progress bar with the last record if stderr is a terminal, else a line for each.

    Args:
        plain: print lines on a terminal, too.
    """

    def __init__(self, plain: bool = False) -> None:
        self._plain = plain or not sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def before_epoch(self, trainer: Trainer) -> None:
        engine = trainer.engine
        if self._plain or engine.context.rank != 0:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            columns = TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True))
            self._bar.start()
        total = engine.dataloader.loader.length if engine.has_dataloader else None
        done = engine.dataloader.next_batch if engine.has_dataloader else 0
        self._task = self._bar.add_task("", total=total, completed=done, epoch=trainer.epoch)

    def after_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def write(self, trainer: Trainer, record: Record) -> None:
        text = "  ".join(f"{name} {_short(value)}" for name, value in record.items() if name not in ("step", "epoch"))
        if self._bar is not None:
            self._bar.update(self._task, description=text)
            if any(name.startswith("eval_") for name in record):
                self._bar.console.print(f"epoch {record['epoch']}  step {record['step']}  {text}")
        elif self._plain:
            _log.info("epoch %s  step %s  %s", record["epoch"], record["step"], text)

    def close(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _short(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e9:
        return f"{value:.0f}"  # a loss scale: 65536, as everywhere else
    return f"{value:.4g}" if isinstance(value, float) else str(value)
