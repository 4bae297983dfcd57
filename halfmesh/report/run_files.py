"""The files of a run's folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..log import get_logger

CONFIG = "config.json"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
PRECISION = "precision.json"
FILES = (CONFIG, PLAN, METRICS, PRECISION)

SKIPPED = "skipped"
"""In a record: the numbers of the updates that were skipped since the record before, counted from 1."""
WARNINGS = "warnings"
"""In a record: [updates made by then, text] of each warning since the record before."""

_log = get_logger(__name__)


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`: the whole of it, or what was there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(text)
    os.replace(new, path)


def format_record(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON, in which inf and nan are null."""
    is_odd = {name: isinstance(value, float) and not math.isfinite(value) for name, value in record.items()}
    return json.dumps({name: None if is_odd[name] else value for name, value in record.items()}) + "\n"


def parse_record(line: str) -> dict[str, Any] | None:
    """The record of a line; None if it cannot be read, as when a run was killed while it wrote."""
    try:
        record = json.loads(line)
        return record if record["step"] >= 0 else None
    except (ValueError, TypeError, LookupError):
        return None


def drop_records(path: Path, step: int) -> tuple[set[int], list[tuple[int, str]]]:
    """Take the records after update `step` out of the file, and lines that cannot be read.

    Returns:
        What these records say of the updates up to `step`: which were skipped, and the warnings.
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
    """The list `key` that earlier sessions of the run wrote; a file that cannot be read is renamed."""
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text())[key])
    except (ValueError, LookupError, TypeError):
        aside = path.with_name(f"{path.name}.unreadable")
        path.replace(aside)
        _log.warning("%s could not be read, and is %s now", path, aside.name)
        return []


def move_earlier(directory: Path) -> None:
    """Move the files of an earlier run into a folder of their own, which can be reported as well."""
    there = [path for name in FILES if (path := directory / name).exists()]
    if not there:
        return
    number = 1
    while (earlier := directory / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for path in there:
        path.rename(earlier / path.name)
    _log.info("%s held a run already, which is in %s now", directory, earlier)
