"""The tables of the page: rows with a name, and a text for each run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from ..errors import counted, readable
from .run import Run

Rows = list[tuple[str, list[str]]]

_STATUS = {
    "finished": "✓ finished",
    "failed": "✗ failed",
    "interrupted": "⏸ interrupted",
    "preempted": "⏸ preempted and saved",
    "running": "… still running, or killed",
}


def number(value: float) -> str:
    """A value with at most 5 digits; integers with all digits."""
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e15 else f"{value:,.5g}"


def status(run: Run) -> str:
    """The end of the run in words, with a mark that works without color."""
    words = _STATUS.get(run.session.get("status", ""), "? unknown")
    if stopped := run.session.get("stopped"):
        words += f", stopped early: {stopped}"
    return f"{words}: {run.session['error']}" if run.session.get("error") else words


def summarise(runs: Sequence[Run]) -> Rows:
    """The outcome of each run, and its machine."""

    def each(text: Callable[[Run], str]) -> list[str]:
        return [text(run) for run in runs]

    def of(name: str, text: Callable[[list[float]], str]) -> list[str]:
        found = [run.series[name].numbers if name in run.series else [] for run in runs]
        return [text(values) if values else "" for values in found]

    rows = {
        "Status": each(status),
        "Started": each(lambda run: f"{_time(run.sessions[0]['started']):%Y-%m-%d %H:%M} UTC" if run.sessions else ""),
        "Duration": each(_duration),
        "Resumed": each(lambda run: ", ".join(f"after update {s['from_step']}" for s in run.sessions[1:])),
        "Updates": each(lambda run: f"{max(run.last_step, run.session.get('to_step') or 0):,}"),
        "Skipped updates": each(_skipped),
        "Loss": of("loss", lambda found: f"{number(found[-1])} (last)"),
        "Eval loss": of("eval_loss", lambda found: f"{number(found[-1])} (last), {number(min(found))} (best)"),
        "Throughput": of("samples_per_s", lambda found: f"{number(statistics.median(found))} samples/s (median)"),
        "Memory": of("memory_mib", lambda found: f"{readable(max(found) * 2**20)} (peak)"),
        "Optimizer": each(_optimizer),
        "Machine": each(_machine),
        "Versions": each(lambda run: ", ".join(f"{k} {v}" for k, v in run.session.get("versions", {}).items())),
        "Command": each(lambda run: " ".join(run.session.get("argv", []))),
        "Folder": each(lambda run: str(run.path)),
    }
    return [(name, texts) for name, texts in rows.items() if any(texts)]


def plan_rows(runs: Sequence[Run]) -> Rows:
    """The resolved configurations, as `initialize` prints them."""
    plans = [run.plan.get("rows", {}) for run in runs]
    return [(name, [plan.get(name, "") for plan in plans]) for name in dict.fromkeys(n for plan in plans for n in plan)]


def config_rows(runs: Sequence[Run]) -> Rows:
    """The keys that some run sets, or whose defaults differ."""
    everything = [all_keys(run.session) for run in runs]
    names = dict.fromkeys(key for run in runs for key in _flatten(run.session.get("config", {})))
    shared = [key for key in everything[0] if all(key in found for found in everything)]
    names |= dict.fromkeys(key for key in shared if len({found[key] for found in everything}) > 1)
    return [(key, [found.get(key, "(not set)") for found in everything]) for key in names]


def differences(runs: Sequence[Run]) -> Rows:
    """The rows of configs and plans whose texts differ."""
    rows = config_rows(runs) + [(f"plan: {name}", texts) for name, texts in plan_rows(runs)]
    return [(name, texts) for name, texts in rows if len(set(texts)) > 1]


def all_keys(session: dict[str, Any]) -> dict[str, str]:
    """Every key of a session's config, including defaults, as text."""
    return _flatten(session.get("settings", {})) | _flatten(session.get("config", {}))


def changes(runs: Sequence[Run]) -> list[str]:
    """The changes when a run was resumed, in words."""
    said = []
    for run in runs:
        for before, after in zip(run.sessions, run.sessions[1:], strict=False):
            old, new = all_keys(before), all_keys(after)
            said += [
                f"{run.name}, from update {after['from_step']}: {key} {old.get(key)} -> {new.get(key)}"
                for key in old | new
                if old.get(key) != new.get(key)
            ]
    return said


def _flatten(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested dicts as dotted keys; other values as JSON."""
    found: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            found |= _flatten(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return found


def _optimizer(run: Run) -> str:
    """The settings of each group of parameters at the start of the run, without those that are off."""
    groups = run.plan.get("values", {}).get("optimizer", [])
    said = (
        ", ".join([group["type"], *(f"{key} {value}" for key, value in group.items() if value and key != "type")])
        for group in groups
    )
    return "; ".join(dict.fromkeys(said))


def _machine(run: Run) -> str:
    if not run.sessions:
        return ""
    ranks, device = run.session["world_size"], run.session["device"]
    return (
        f"{ranks} x {device}" if "cuda" in run.session.get("versions", {}) else f"{counted(ranks, 'rank')} on {device}"
    )


def _skipped(run: Run) -> str:
    return "" if run.skipped_steps is None and not run.skipped else f"{max(run.skipped_steps or 0, len(run.skipped)):,}"


def _duration(run: Run) -> str:
    seconds = 0.0
    for session in run.sessions:
        end = run.written if session is run.session else None
        end = _time(session["ended"]) if session["ended"] else end
        seconds += 0.0 if end is None else max(0.0, (end - _time(session["started"])).total_seconds())
    hours, rest = divmod(round(seconds), 3600)
    if not run.sessions:
        return ""
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s".removeprefix("0 min ")


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
