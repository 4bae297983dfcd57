"""Converts another library's config by a table of its keys, with a row for each.

Keys that share a row are in one string; `*` matches anything, and an exact key takes precedence. A row is

- a halfmesh key, for the same value (a `*` in it is the last part of the other key); or (halfmesh key, what to check);
- an `Outcome`: to, done, no, do, lost;
- a dict from values (texts in lower case) to rows, "*" for all others;
- a function of the value, and of all values by key, that returns a row; a ValueError gives the reason why it is wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from ..errors import did_you_mean, show

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a key: values by dotted halfmesh key, if there is anything to write; and why, or what to check.

    Kinds: "converted"; "without" an equivalent, which nothing follows from; "by hand", what the config cannot say;
    "lost" (a precision or sharding without an equivalent); "not understood".
    """

    kind: str
    settings: Values
    note: str = ""


to = partial(Outcome, "converted")
done = partial(Outcome, "converted", {})  # nothing to write
no = partial(Outcome, "without", {})
do = partial(Outcome, "by hand", {})
lost = partial(Outcome, "lost", {})
AS_HERE = done("as here")


def on(row: Any) -> dict[Any, Any]:
    """The rows of a switch: `row` if it is on."""
    return {True: row, False: AS_HERE}


def matches(name: str, patterns: str) -> bool:
    """Return True if one of the patterns matches that key; `section.*` also matches the section."""
    return any(fnmatchcase(name, one) or f"{name}.*" == one for one in patterns.split())


@dataclass(frozen=True)
class Origin:
    """A library whose configs can be converted.

    `needs`: keys that count only if another key has a value: (keys, the other, that value, its default). `prefix`: an
    optional prefix of its keys. `always`: settings that follow from missing keys. `look`: what to check. `calls`:
    calls in a script, by the key to set for them.
    `has_constants`: UPPERCASE keys belong to the user.
    """

    title: str
    rows: Mapping[str, Any]
    needs: tuple[tuple[str, str, Any, Any], ...] = ()
    prefix: str = ""
    always: Callable[[Values], Values] = lambda values: {}
    look: str = ""
    calls: Mapping[str, str] = field(default_factory=dict)
    has_constants: bool = False


def convert(origin: Origin, values: Values) -> tuple[dict[str, Outcome], dict[str, Any]]:
    """The outcome of each key of `values`, which is flat, and the converted config."""
    by_name = {key.removeprefix(origin.prefix): value for key, value in values.items()}
    outcomes = {key: _look_up(origin, key.removeprefix(origin.prefix), value, by_name) for key, value in values.items()}
    flat = dict(origin.always(by_name))
    for key, outcome in outcomes.items():
        if clash := [one for one, value in outcome.settings.items() if flat.get(one, value) != value]:
            outcomes[key] = Outcome("not understood", {}, f"another key says {clash[0]} = {flat[clash[0]]!r}")
        else:
            flat |= outcome.settings
    config: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return outcomes, config


def _look_up(origin: Origin, name: str, value: Any, values: Values) -> Outcome:
    rows = {key: row for keys, row in origin.rows.items() for key in keys.split()}
    row = rows.get(name, next((row for key, row in rows.items() if matches(name, key)), None))
    if row is None and origin.has_constants and name.isupper():
        return to({name: value})  # a user's constant stays one
    if row is None and not any(key.startswith(f"{name}.") for key in rows):
        return Outcome("not understood", {}, f"not a known key of {origin.title}{did_you_mean(name, rows)}")
    if value is None or value == {}:
        return done("nothing to write: it is off or the default")
    is_off = value is False or value == "" or (type(value) is int and value <= 1)
    if (
        is_off and isinstance(row, Outcome) and row.kind in ("lost", "by hand")
    ):  # a row that names the value takes precedence
        return done("off")
    for keys, other, wanted, default in origin.needs:
        if name != other and matches(name, keys) and (given := values.get(other, default)) != wanted:
            return no(f"it has no effect: it needs {other} = {wanted!r}, which is {given!r}")
    try:
        return _follow(row, name, value, values)
    except (ValueError, TypeError, ArithmeticError) as error:
        return Outcome("not understood", {}, str(error))


def _follow(row: Any, name: str, value: Any, values: Values) -> Outcome:
    """The outcome of a row for a value."""
    if isinstance(row, Outcome):
        return row
    if isinstance(row, Mapping):
        given = value.lower() if isinstance(value, str) else value
        if given not in row and "*" not in row:
            raise ValueError(f"{show(value)} is not one of {', '.join(map(repr, row))}")
        return _follow(row.get(given, row.get("*")), name, value, values)
    if value == "auto":
        raise ValueError("'auto' is resolved only when a run starts; write the value")
    if isinstance(row, str | tuple):
        key, look = (row, "") if isinstance(row, str) else row
        return to({key.replace("*", name.rpartition(".")[2]): value}, look)
    return _follow(row(value, values), name, value, values)
