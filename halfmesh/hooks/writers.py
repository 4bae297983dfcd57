"""Records into files: JSON lines, CSV, TensorBoard. Rank 0 writes."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..report.run_files import RecordFile, begin_together, is_again, replace_file, set_aside, trained_at
from ..trainer.hook import Hook, Record

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class JSONLHook(Hook):
    """Appends each record as a line of JSON; inf and nan are written as null.

    A run that goes on from a checkpoint takes away the records of what is trained again. One that begins renames a file
    that is there.

    Args:
        path: the file; its folder is made if it is not there.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = RecordFile(self._path)

    def before_fit(self, trainer: Trainer) -> None:
        engine = trainer.engine
        begin_together(engine.context, self._path, "file", lambda: self._file.open(engine.global_step))

    def write(self, trainer: Trainer, record: Record) -> None:
        self._file.write(record)

    def close(self, trainer: Trainer) -> None:
        self._file.close()


class CSVHook(Hook):
    """Writes the records as a table; what a record does not have stays empty.

    A run that goes on from a checkpoint takes away the rows of what is trained again. One that begins renames a file
    that is there.

    Args:
        path: the file; its folder is made if it is not there. A column that comes later has the file written anew.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = []
        self._has = -1.0

    def before_fit(self, trainer: Trainer) -> None:
        engine = trainer.engine
        begin_together(engine.context, self._path, "file", lambda: self._begin(engine.global_step))

    def _begin(self, step: int) -> None:
        self._rows, self._columns = [], []
        if step == 0:
            set_aside(self._path)
        if self._path.exists():
            with self._path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self._rows = [row for row in rows if int(row.get("step") or 0) <= step]
        self._has = trained_at(self._rows)
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))
        self._write_all()

    def write(self, trainer: Trainer, record: Record) -> None:
        if trainer.engine.context.rank != 0 or is_again(record, self._has):
            return
        self._rows.append(record)
        new = [name for name in record if name not in self._columns]
        if new:
            self._columns += new
            self._write_all()
            return
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(record)

    def _write_all(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(self._rows)
        replace_file(self._path, text.getvalue())


class TensorBoardHook(Hook):
    """Writes the records for TensorBoard, one scalar for each name, by update.

    Args:
        log_dir: the folder that `tensorboard --logdir` is given.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self._log_dir = log_dir
        self._writer: Any = None

    def before_fit(self, trainer: Trainer) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(f"TensorBoardHook needs tensorboard ({error}): pip install tensorboard") from error
        if trainer.engine.context.rank == 0:
            # Of what an interrupted run has written after its checkpoint nothing is shown.
            self._writer = SummaryWriter(self._log_dir, purge_step=trainer.engine.global_step + 1)

    def write(self, trainer: Trainer, record: Record) -> None:
        if self._writer is not None:
            for name, value in record.items():
                if name != "step":
                    self._writer.add_scalar(name, value, record["step"])

    def close(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
