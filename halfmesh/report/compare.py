"""The configs of runs, key by key, and where they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .run import Run


@dataclass(frozen=True)
class Row:
    """A key, and its value in each run; None: it has none there."""

    key: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        """Whether runs have different values."""
        return len(set(self.values)) > 1


def set_keys(runs: Sequence[Run]) -> list[Row]:
    """The keys that some run has set, or that have other defaults, with the values that all of them had."""
    names = dict.fromkeys(key for run in runs for key in flatten(run.session.get("config")))
    everything = [all_keys(run.session) for run in runs]
    shared = [key for key in everything[0] if all(key in found for found in everything)]
    names |= dict.fromkeys(key for key in shared if len({found[key] for found in everything}) > 1)
    return [Row(key, tuple(found.get(key) for found in everything)) for key in names]


def all_keys(session: dict[str, Any]) -> dict[str, str]:
    """Every key of a session's config, defaults too, as text."""
    given = flatten(session.get("config"))
    defaults = flatten(session.get("settings"))
    # A section that is off is None in one, and has keys in the other.
    outer = {key for key in defaults if any(other.startswith(f"{key}.") for other in given)}
    return {key: value for key, value in defaults.items() if key not in outer} | given


def changes(runs: Sequence[Run]) -> list[str]:
    """What a run went on with that was different before, in words."""
    said = []
    for run in runs:
        for before, after in zip(run.sessions, run.sessions[1:], strict=False):
            old, new = all_keys(before), all_keys(after)
            for key in dict.fromkeys([*old, *new]):
                if old.get(key) != new.get(key):
                    step = after.get("from_step")
                    said.append(f"{run.name}, from update {step}: {key} {old.get(key)} -> {new.get(key)}")
    return said


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested dicts as dotted keys; other values as JSON."""
    if isinstance(value, dict) and (value or not prefix):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
        return found
    if not prefix:
        return {}
    return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
