"""The files in the folder of a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def parse_record(line: str) -> dict[str, Any] | None:
    """The record of a line; None if it is unreadable, as when a run is killed while it writes."""
    try:
        record = json.loads(line)
        return record if record["step"] >= 0 else None
    except (ValueError, TypeError, LookupError):
        return None


def drop_records(path: Path, step: int) -> tuple[set[int], list[tuple[int, str]]]:
    """Remove the records after update `step` from the file, and unreadable lines.

    Returns:
        The skipped updates and the warnings up to `step` that the removed records had.
    """
    kept, skipped, warnings = list[str](), set[int](), list[tuple[int, str]]()
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        record = parse_record(line)
        if record is not None and record["step"] <= step:
            kept.append(f"{line}\n")
        elif record is not None:
            skipped |= {number for number in record.get(SKIPPED, ()) if number <= step}
            warnings += [(made, text) for made, text in record.get(WARNINGS, ()) if made <= step]
    replace_file(path, "".join(kept))
    return skipped, warnings


def read_earlier(path: Path, key: str) -> list[dict[str, Any]]:
    """The list `key` that earlier sessions of the run wrote; an unreadable file is renamed."""
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text())[key])
    except (ValueError, LookupError, TypeError):
        aside = path.with_name(f"{path.name}.unreadable")
        path.replace(aside)
        _log.warning("%s is unreadable, and was renamed to %s", path, aside.name)
        return []


def move_earlier(directory: Path) -> None:
    """Move the files of an earlier run to a separate folder, which `halfmesh report` can show, too."""
    there = [path for name in FILES if (path := directory / name).exists()]
    if not there:
        return
    number = 1
    while (earlier := directory / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for path in there:
        path.rename(earlier / path.name)
    _log.info("%s held an earlier run, which was moved to %s", directory, earlier)
