"""The files in the folder of a run, and what they say: unreadable parts are skipped and noted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import InputError, counted, show_name
from ..utils.log import get_logger

CONFIG = "config.json"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
PRECISION = "precision.json"
FILES = (CONFIG, PLAN, METRICS, PRECISION)

SKIPPED = "skipped"
"""In a record: the numbers (from 1) of the updates skipped since the last record."""
WARNINGS = "warnings"
"""In a record: [updates made by then, text] of each warning since the last record."""

_log = get_logger(__name__)
_NO_VALUES = ("step", "epoch", "skipped_steps")


@dataclass
class Series:
    """Values by number of updates (`step`), ascending; None (a gap) for inf and nan."""

    step: list[int] = field(default_factory=list)
    value: list[float | None] = field(default_factory=list)

    @property
    def numbers(self) -> list[float]:
        """The values without gaps."""
        return [value for value in self.value if value is not None]


@dataclass
class Run:
    """A run's folder.

    Attributes:
        name: its name on the page.
        sessions: one for each start or resume, as RunFolder wrote it; the latest last.
        plans: resolved configurations, as RunFolder wrote them; the latest last.
        series: the recorded values, by name.
        skipped: numbers of the skipped updates, ascending.
        skipped_steps: the number of skipped updates; None if it is not recorded.
        warnings: each text once, with the number of updates made by then.
        last_step: the last update that has a record.
        precision: the result of `engine.precision_report()`; empty without one.
        notes: missing or unreadable parts, in words.
        written: when the last record was written.
    """

    name: str
    path: Path
    sessions: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    series: dict[str, Series] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    skipped_steps: int | None = None
    warnings: dict[str, int] = field(default_factory=dict)
    last_step: int = 0
    precision: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    written: datetime | None = None

    @property
    def session(self) -> dict[str, Any]:
        """The last one; empty if there is none."""
        return self.sessions[-1] if self.sessions else {}

    @property
    def plan(self) -> dict[str, Any]:
        """The last one; empty if there is none."""
        return self.plans[-1] if self.plans else {}


def read_run(path: Path) -> Run:
    """Read a folder. Unreadable parts are skipped, and listed in `notes`.

    Raises:
        InputError: the folder does not exist, or is not a run's.
    """
    if not any((path / name).is_file() for name in FILES):
        what = "holds none of " + ", ".join(FILES) if path.is_dir() else "is not a folder"
        raise InputError(f"{show_name(str(path))} {what}; give the folder of a RunFolder or of the hook 'run'")
    run = Run(path.resolve().name, path)
    run.sessions = _read_json(run, CONFIG).get("sessions", [])
    run.plans = _read_json(run, PLAN).get("plans", [])
    run.precision = _read_json(run, PRECISION) if (path / PRECISION).exists() else {}
    if (path / METRICS).exists():
        run.written = datetime.fromtimestamp((path / METRICS).stat().st_mtime, UTC)
    records, unreadable = read_records(path / METRICS)
    if unreadable:
        run.notes.append(f"{METRICS}: {counted(unreadable, 'unreadable line')} left out")
    if not records:
        run.notes.append(f"{METRICS} has no records: the run ended before the first one, or recorded nothing")
    _add_records(run, records)
    if run.skipped_steps is not None and (missing := run.skipped_steps - len(run.skipped)) > 0:
        run.notes.append(
            f"the numbers of {missing} of {run.skipped_steps} skipped updates are unknown: a session was killed before "
            "it recorded them, or the loop did not call run.note"
        )
    return run


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs of several folders, with names that differ."""
    if not paths:
        raise InputError("there is no run to report; give the folder of a run")
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    for number, run in enumerate(runs, start=1):
        if names.count(run.name) > 1:
            run.name = f"{'/'.join(run.path.resolve().parts[-2:])} ({number})"
    return runs


def _read_json(run: Run, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads((run.path / name).read_text()))
    except (OSError, ValueError, TypeError) as error:
        run.notes.append(f"{name} is unreadable ({type(error).__name__})")
        return {}


def _add_records(run: Run, records: list[dict[str, Any]]) -> None:
    skipped, by_name = set[int](), dict[str, dict[int, float | None]]()
    for record in sorted(records, key=lambda record: record["step"]):
        step = run.last_step = record["step"]
        skipped.update(record.pop(SKIPPED, ()))
        for made, text in record.pop(WARNINGS, ()):
            run.warnings.setdefault(text, made)
        run.skipped_steps = record.get("skipped_steps", run.skipped_steps)
        for name, value in record.items():
            if name not in _NO_VALUES and isinstance(value, (int, float, type(None))):
                is_finite = value is not None and math.isfinite(value)
                by_name.setdefault(name, {})[step] = value if is_finite else None
    run.skipped = sorted(skipped)
    run.series = {name: Series(list(found), list(found.values())) for name, found in by_name.items()}


# -- the files ----------------------------------------------------------------------------------------------------


def replace_file(path: Path, text: str) -> None:
    """Replace the file at `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(text)
    os.replace(new, path)


def format_record(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON, with null for inf and nan."""
    is_odd = {name: isinstance(value, float) and not math.isfinite(value) for name, value in record.items()}
    return json.dumps({name: None if is_odd[name] else value for name, value in record.items()}) + "\n"


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records in a file, and the number of its unreadable lines, as of a run that was killed while it wrote."""
    records, unreadable = [], 0
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            if record["step"] < 0:
                raise ValueError(line)
            records.append(record)
        except (ValueError, TypeError, LookupError):
            unreadable += 1
    return records, unreadable


def drop_records(path: Path, step: int) -> tuple[list[int], list[tuple[int, str]]]:
    """Remove the records after update `step` from the file, and unreadable lines.

    Returns:
        The skipped updates and the warnings up to `step` that the removed records had.
    """
    records, _ = read_records(path)
    replace_file(path, "".join(format_record(record) for record in records if record["step"] <= step))
    later = [record for record in records if record["step"] > step]
    skipped = {number for record in later for number in record.get(SKIPPED, ()) if number <= step}
    warnings = [(made, text) for record in later for made, text in record.get(WARNINGS, ()) if made <= step]
    return sorted(skipped), warnings


def read_earlier(path: Path, key: str) -> list[dict[str, Any]]:
    """The list `key` that earlier sessions of the run wrote."""
    return list(json.loads(path.read_text())[key]) if path.exists() else []


def move_earlier(directory: Path) -> None:
    """Move the files of an earlier run to a separate folder, which `halfmesh report` can show as well."""
    there = [path for name in FILES if (path := directory / name).exists()]
    if not there:
        return
    number = 1
    while (earlier := directory / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for path in there:
        path.rename(earlier / path.name)
    _log.info("%s holds an earlier run; moved it to %s", directory, earlier)
