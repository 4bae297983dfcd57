"""A conversion as a config.py, as lists for people, and as JSON."""

from __future__ import annotations

import json
import keyword
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..config.load import load_config
from ..errors import cut, show
from .convert import Conversion, Entry
from .outcome import Converted, Lost, NotUnderstood, Without

WIDTH = 100


def as_python(conversion: Conversion, title: str, origin: str) -> str:
    """The config, with comments where the user should look, and a list of what is not in it."""
    lines = [*_comment(f"Made by halfmesh convert-config from {title} ({origin})."), ""]
    for finding in conversion.findings:
        lines += _comment(f"CANNOT RUN{_where(conversion)}: {finding}")
    for entry in conversion.of(Lost):
        lines += _comment(f"LOST: {_line(entry)}")
    for look in conversion.looks:
        lines += _comment(f"LOOK: {look}")
    if conversion.looks or conversion.findings or conversion.of(Lost):
        lines.append("")
    for key, value in conversion.settings.items():
        for entry in conversion.of(Converted):
            outcome = entry.outcome
            if isinstance(outcome, Converted) and outcome.look and key in _tops(outcome):
                lines += _comment(f"LOOK: {entry.key}: {outcome.look}")
        lines.append(f"{key} = {_show(value, 0)}")
    rest = [entry for entry in conversion.entries if isinstance(entry.outcome, Converted) and _is_loose(entry.outcome)]
    for entry in rest:
        lines += _comment(f"LOOK: {entry.key}: {getattr(entry.outcome, 'look', '')}")
    for heading, entries in _rest(conversion):
        lines += ["", f"# {heading}:"]
        for entry in entries:
            lines += _comment(f"- {_line(entry)}", indent="  ")
    return "\n".join(lines) + "\n"


def verify(text: str, conversion: Conversion) -> None:
    """Load the written config, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.py")
        path.write_text(text, encoding="utf-8")
        if repr(load_config(path)) != repr(conversion.config):
            raise RuntimeError(f"the written config is not what was converted; this is a bug:\n{text}")


def summary(conversion: Conversion) -> Iterator[str]:
    """The three lists."""
    yield f"converted: {len(conversion.of(Converted))}"
    for entry in conversion.of(Converted):
        yield f"  {_line(entry)}"
        if isinstance(entry.outcome, Converted) and entry.outcome.look:
            yield f"    look: {entry.outcome.look}"
    for heading, entries in _rest(conversion):
        yield f"{heading}: {len(entries)}"
        for entry in entries:
            yield f"  {_line(entry)}"
    for entry in conversion.of(Lost):
        yield f"lost: {_line(entry)}"
    for look in conversion.looks:
        yield f"look: {look}"
    if conversion.findings:
        yield f"cannot run{_where(conversion)}:"
    for finding in conversion.findings:
        yield f"  - {finding}"


def _where(conversion: Conversion) -> str:
    return "" if conversion.world_size is None else f" on {conversion.world_size} rank(s)"


def as_json(conversion: Conversion, text: str) -> dict[str, Any]:
    """The same for a program."""
    return {
        "ok": not (conversion.findings or conversion.of(NotUnderstood) or conversion.of(Lost)),
        "world_size": conversion.world_size,
        "findings": list(conversion.findings),
        "lost": [entry.key for entry in conversion.of(Lost)],
        "looks": list(conversion.looks),
        "converted": [
            {
                "key": entry.key,
                "to": {key: _plain(value) for key, value in entry.outcome.settings.items()},
                "says": entry.outcome.says,
                "look": entry.outcome.look,
            }
            for entry in conversion.of(Converted)
            if isinstance(entry.outcome, Converted)
        ],
        "without_equivalent": _reasons(conversion.of(Without)),
        "not_understood": _reasons(conversion.of(NotUnderstood)),
        "config": text,
    }


def _reasons(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [
        {"key": entry.key, "value": show(entry.value), "reason": getattr(entry.outcome, "reason", "")}
        for entry in entries
    ]


def _rest(conversion: Conversion) -> Iterator[tuple[str, list[Entry]]]:
    for heading, kind in (("without equivalent", Without), ("not understood", NotUnderstood)):
        if entries := conversion.of(kind):
            yield heading, entries


def _tops(outcome: Converted) -> set[str]:
    return {key.partition(".")[0] for key in outcome.settings}


def _is_loose(outcome: Converted) -> bool:
    return bool(outcome.look) and not outcome.settings


def _line(entry: Entry) -> str:
    outcome = entry.outcome
    given = f"{entry.key} = {show(entry.value, 80)}"
    if not isinstance(outcome, Converted):
        return f"{given}: {outcome.reason}"
    keys = ", ".join(f"{key} = {show(value, 80)}" for key, value in outcome.settings.items())
    return f"{given} -> {keys or outcome.says}"


def _comment(text: str, indent: str = "") -> list[str]:
    """A comment of some lines, from whatever text."""
    clean = " ".join(cut(" ".join(text.split()), 2000).split())
    return textwrap.wrap(
        clean, WIDTH, initial_indent="# ", subsequent_indent=f"# {indent}", break_on_hyphens=False
    ) or ["#"]


def _show(value: Any, depth: int) -> str:
    """A literal as one would write it, on several lines where one would be too long."""
    if isinstance(value, dict):
        named = bool(value) and all(_is_name(key) for key in value)
        items = [
            f"{key}={_show(item, depth + 1)}" if named else f"{_show(key, depth + 1)}: {_show(item, depth + 1)}"
            for key, item in value.items()
        ]
        first, last = ("dict(", ")") if named else ("{", "}")
        line = f"{first}{', '.join(items)}{last}"
        if len(line) <= WIDTH - 20 and "\n" not in line:
            return line
        pad = "    " * (depth + 1)
        return "\n".join([first, *(f"{pad}{item}," for item in items), f"{pad[4:]}{last}"])
    if isinstance(value, (list, tuple)):
        items = [_show(item, depth + 1) for item in value]
        text = ", ".join(items)
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' if len(items) == 1 else ''})"
    if isinstance(value, str) and value.isascii():
        return json.dumps(value)
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value)


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, dict, list)) or value is None else repr(value)
