"""How runs went, in a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from .axes import readable
from .run import Run

_MARKS = {"finished": "✓", "failed": "✗", "preempted": "⏸", "running": "…", "unknown": "?"}


def summarise(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Rows: a name, and a text for each run."""
    rows = {
        "Status": [in_words(run) for run in runs],
        "Started": [_time(_first(run).get("started")) for run in runs],
        "Duration": [_duration(run) for run in runs],
        "Gone on with": [_resumed(run) for run in runs],
        "Updates": [_updates(run) for run in runs],
        "Skipped": [_skipped(run) for run in runs],
        "Loss": [_last(run, "loss") for run in runs],
        "Eval loss": [_eval(run) for run in runs],
        "Throughput": [_throughput(run) for run in runs],
        "Memory": [_memory(run) for run in runs],
        "Ranks": [_ranks(run) for run in runs],
        "Versions": [_versions(run) for run in runs],
        "Command": [" ".join(map(str, _list(run.session.get("argv")))) for run in runs],
        "Folder": [str(run.path) for run in runs],
    }
    return [(name, texts) for name, texts in rows.items() if any(texts)]


def status_of(run: Run) -> str:
    """finished, failed, preempted, running or unknown."""
    status = run.session.get("status")
    return status if isinstance(status, str) and status in _MARKS else "unknown"


def in_words(run: Run) -> str:
    """The status, with a mark that needs no colour."""
    status = status_of(run)
    words = {
        "failed": f"failed: {run.session.get('error') or 'no reason was written'}",
        "preempted": "preempted, and saved",
        "running": "no end was written: it still runs, or was killed",
        "unknown": "unknown",
    }
    return f"{_MARKS[status]} {words.get(status, status)}"


def _first(run: Run) -> dict[str, Any]:
    return run.sessions[0] if run.sessions else {}


def _duration(run: Run) -> str:
    seconds = 0.0
    for session in run.sessions:
        begin, end = _parse(session.get("started")), _parse(session.get("ended"))
        end = run.written if end is None and session is run.sessions[-1] else end
        if begin is not None and end is not None:
            seconds += max(0.0, (end - begin).total_seconds())
    if not run.sessions:
        return ""
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"


def _resumed(run: Run) -> str:
    return ", ".join(f"after update {session.get('from_step')}" for session in run.sessions[1:])


def _updates(run: Run) -> str:
    last = run.session.get("to_step")
    return f"{max(run.last_step, last) if isinstance(last, int) else run.last_step:,}"


def _skipped(run: Run) -> str:
    count = max(run.skipped_count or 0, len(run.skipped))
    return "" if run.skipped_count is None and not run.skipped else f"{count:,}"


def _last(run: Run, name: str) -> str:
    series = run.series.get(name)
    return f"{readable(series.last)} at the end" if series is not None and series.last is not None else ""


def _eval(run: Run) -> str:
    series = run.series.get("eval_loss")
    values = [] if series is None else [value for value in series.values if value is not None]
    return f"{readable(values[-1])} at the end, {readable(min(values))} at best" if values else ""


def _throughput(run: Run) -> str:
    series = run.series.get("samples_per_s")
    values = [] if series is None else [value for value in series.values if value is not None]
    return f"{readable(statistics.median(values))} samples/s (median)" if values else ""


def _memory(run: Run) -> str:
    series = run.series.get("memory_mib")
    values = [] if series is None else [value for value in series.values if value is not None]
    return f"{readable(max(values))} MiB at most" if values else ""


def _ranks(run: Run) -> str:
    count, device = run.session.get("world_size"), run.session.get("device")
    return f"{count} x {device}" if count and device else ""


def _versions(run: Run) -> str:
    versions = run.session.get("versions")
    return ", ".join(f"{name} {value}" for name, value in versions.items()) if isinstance(versions, dict) else ""


def _time(value: Any) -> str:
    found = _parse(value)
    return "" if found is None else found.strftime("%Y-%m-%d %H:%M UTC")


def _parse(value: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(value)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
