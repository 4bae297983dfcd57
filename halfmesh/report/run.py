"""A run as its folder has it: whatever can be read of it, and what is missing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import InputError, find_near, shorten, show_name
from .names import CONFIG, FILES, METRICS, PLAN, PRECISION, SKIPPED, WARNINGS

_MOST_STEPS = 10**15
_NO_VALUES = ("step", "epoch", SKIPPED, WARNINGS, "skipped_steps")


@dataclass
class Series:
    """Values by the number of updates, in its order; None is a gap: inf, nan, or none."""

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    @property
    def last(self) -> float | None:
        """The last value that is one."""
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass
class Run:
    """A run's folder.

    Attributes:
        name: by which the page calls it.
        sessions: each time it was begun or gone on with; the last one last. Dicts as RunFolder has written them.
        plans: what the config came down to; the last one last.
        series: what was recorded, by name.
        skipped: numbers of the updates that were skipped, ascending.
        skipped_count: how many were; None if no record says so.
        warnings: in words, each text once, with the updates that were made by then.
        last_step: updates as far as records go.
        precision: of `engine.precision_report()`; empty if nobody asked for it.
        notes: what is missing or damaged, in words.
        written: when the last record was written.
    """

    name: str
    path: Path
    sessions: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    series: dict[str, Series] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    skipped_count: int | None = None
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
    """Read what there is.

    Raises:
        InputError: the folder is not there, or no run's; the message names those that are near.
    """
    _refuse_no_run(path)
    run = Run(path.resolve().name or str(path), path)
    _read_records(run)
    run.sessions = _dicts(_read_json(run, CONFIG).get("sessions"))
    run.plans = _dicts(_read_json(run, PLAN).get("plans"))
    if (path / PRECISION).exists():
        run.precision = _read_json(run, PRECISION)
    missing = run.skipped_count is not None and run.skipped_count - len(run.skipped)
    if missing and missing > 0:
        run.notes.append(
            f"{missing} of {run.skipped_count} skipped updates have no number: they were skipped before the folder was "
            "begun, between the last record and the end of an interrupted run, or were not noted"
        )
    return run


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs of several folders, with names that differ."""
    if not paths:
        raise InputError("there is no run to report: give the folder of one")
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    for number, run in enumerate(runs, start=1):
        if names.count(run.name) > 1:
            longer = "/".join(run.path.resolve().parts[-2:])
            same = sum("/".join(other.path.resolve().parts[-2:]) == longer for other in runs)
            run.name = longer if same == 1 else f"{longer} ({number})"
    return runs


def _refuse_no_run(path: Path) -> None:
    shown = show_name(str(path))
    if path.is_dir():
        if any((path / name).exists() for name in FILES):
            return
        inside = _runs_in(path)
        if inside:
            raise InputError(f"{shown} holds runs and is none itself: give {shorten(inside)}")
        raise InputError(
            f"{shown} is no run's folder: it has none of {', '.join(FILES)}{_near(path)}; the hook 'run' and "
            "halfmesh.RunFolder make such folders"
        )
    if path.exists():
        parent = path.parent if path.name in FILES else None
        what = f"; give {parent}" if parent is not None else ""
        raise InputError(f"{shown} is a file, but a run is a folder{what}")
    raise InputError(f"there is no folder {shown}{_near(path)}")


def _near(path: Path) -> str:
    """Runs beside `path`, in words."""
    beside = _runs_in(path.parent)
    near = find_near(path.name, beside)
    if near is not None:
        return f"; did you mean {str(path.parent / near)!r}?"
    return f"; runs beside it: {shorten([str(path.parent / name) for name in beside])}" if beside else ""


def _runs_in(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir() if any((p / name).is_file() for name in FILES))
    except OSError:
        return []


def _read_json(run: Run, name: str) -> dict[str, Any]:
    path = run.path / name
    try:
        content = _DECODER.decode(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        run.notes.append(f"{name} is missing")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        run.notes.append(f"{name} cannot be read ({type(error).__name__})")
        return {}
    if not isinstance(content, dict):
        run.notes.append(f"{name} holds something else than expected")
        return {}
    return content


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _read_records(run: Run) -> None:
    path = run.path / METRICS
    records: list[tuple[int, dict[str, Any]]] = []
    damaged = 0
    is_cut = False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                read = _as_record(line)
                if read is not None:
                    records.append(read)
                elif line.strip():
                    damaged += 1
                    is_cut = not line.endswith("\n")
        run.written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except FileNotFoundError:
        run.notes.append(f"{METRICS} is missing: there is nothing to draw")
        return
    except OSError as error:
        run.notes.append(f"{METRICS} cannot be read ({type(error).__name__})")
        return
    if is_cut:
        run.notes.append(f"the last line of {METRICS} was cut off, as when a run is killed, and is left out")
    if damaged > is_cut:
        run.notes.append(f"{damaged - is_cut} line(s) of {METRICS} are no records, and are left out")
    if not records:
        run.notes.append(f"{METRICS} has no records: the run ended before its first, or they were not asked for")
    skipped: set[int] = set()
    for step, record in sorted(records, key=lambda item: item[0]):
        run.last_step = max(run.last_step, step)
        skipped.update(_numbers(record.get(SKIPPED)))
        for made, text in _warnings(record.get(WARNINGS)):
            run.warnings.setdefault(text, made)
        count = record.get("skipped_steps")
        if isinstance(count, int) and not isinstance(count, bool):
            run.skipped_count = count
        for name, value in record.items():
            if name not in _NO_VALUES and (value is None or _is_number(value)):
                series = run.series.setdefault(name, Series())
                series.steps.append(step)
                series.values.append(_finite(value))
    run.skipped = sorted(skipped)


def _as_record(line: str) -> tuple[int, dict[str, Any]] | None:
    try:
        record = _DECODER.decode(line)
        step = record["step"]
        return (int(step), record) if _is_number(step) and 0 <= step < _MOST_STEPS else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _as_int(digits: str) -> int | float:
    """What no float can hold is inf."""
    return int(digits) if len(digits) < 16 else float(digits)


_DECODER = json.JSONDecoder(parse_int=_as_int)


def _numbers(value: Any) -> list[int]:
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item > 0]


def _warnings(value: Any) -> list[list[Any]]:
    items = value if isinstance(value, list) else []
    pairs = [item for item in items if isinstance(item, list) and len(item) == 2]
    return [pair for pair in pairs if type(pair[0]) is int and 0 <= pair[0] < _MOST_STEPS and isinstance(pair[1], str)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
