"""Files of records that a resumed run continues."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, cut, show_name
from ..log import get_logger

if TYPE_CHECKING:
    from ..parallel.context import ParallelContext

_log = get_logger(__name__)


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`: the whole of it, or what was there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(text)
    os.replace(new, path)


def set_aside(path: Path) -> None:
    """Rename the file `path`, another run's, if it is there and not empty. Raises IsADirectoryError for a folder."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    if not path.exists() or not path.stat().st_size:
        return
    number = 1
    while (old := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(old)
    _log.info("%s was there already, and is %s now", path, old.name)


def begin_together(context: ParallelContext, path: Path, begin: Callable[[], object]) -> None:
    """Call `begin` on rank 0, which makes the folder `path`. All ranks together.

    Raises:
        InputError: it cannot be written; on all ranks.
    """
    problem = None
    if context.rank == 0:
        try:
            begin()
        except (OSError, ValueError, TypeError) as error:  # the other ranks wait for the answer
            problem = cut(f"{type(error).__name__}: {error}")
    problem = context.from_first(problem)
    if problem is not None:
        raise InputError(
            f"{show_name(str(path))} cannot be the folder of a run ({problem}); give a folder that rank 0 may "
            "write to, or a name that is not there yet"
        )


def trained_at(records: Iterable[Mapping[str, Any]]) -> float:
    """The update of the last record of training that is kept; -1: there is none."""
    return max((float(record.get("step") or -1) for record in records if "loss" in record), default=-1)


def is_again(record: Mapping[str, Any], kept: float) -> bool:
    """Whether a record of training is there already: a run that was saved between an epoch's last step and its record
    makes it once more."""
    return "loss" in record and record.get("step") == kept


class RecordFile:
    """Records of a run as lines of JSON; inf and nan are written as null. Nothing is written before `open`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._last = ""
        self._has = -1.0

    def open(self, step: int) -> list[str]:
        """Begin to write a run that goes on after update `step`; at 0 a file that is there is renamed.

        Returns:
            The lines that were taken away: of what is trained again, and one that a crash has cut off.
        """
        if step == 0:
            set_aside(self._path)
        text = self._path.read_text(encoding="utf-8", errors="replace") if self._path.exists() else ""
        records = [(line, _parse(line)) for line in text.splitlines()]
        kept = [(line, record) for line, record in records if record.get("step", -1) <= step]
        self._last = kept[-1][0] if kept else ""
        self._has = trained_at(record for _, record in kept)
        replace_file(self._path, "".join(f"{line}\n" for line, _ in kept))
        self._file = self._path.open("a")
        return [line for line, record in records if record.get("step", -1) > step]

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line."""
        if self._file is None or is_again(record, self._has):
            return
        is_odd = {name: isinstance(value, float) and not math.isfinite(value) for name, value in record.items()}
        line = json.dumps({name: None if is_odd[name] else value for name, value in record.items()})
        if line != self._last:  # an evaluation that was made again
            self._file.write(f"{line}\n")
            self._file.flush()
        self._last = line

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {"step": math.inf}
    return record if isinstance(record, dict) else {}
