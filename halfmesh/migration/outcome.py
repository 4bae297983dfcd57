"""What becomes of one key of another engine's config, and the rules that say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import show
from .source import Source


@dataclass(frozen=True)
class Converted:
    """It has a place here.

    Attributes:
        settings: values by halfmesh's dotted key; empty where halfmesh does the same without a key.
        says: what to say in place of `settings`.
        look: what the user should look at: the meaning differs.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""
    look: str = ""


@dataclass(frozen=True)
class Without:
    """It has no equivalent. `reason` says why, and what to do instead."""

    reason: str


@dataclass(frozen=True)
class Lost(Without):
    """A precision, or a way to shard, that the config has not. `reason` says why, and what to do instead."""


@dataclass(frozen=True)
class NotUnderstood:
    """It is no key of that engine's, or its value cannot be read."""

    reason: str


Outcome = Converted | Without | NotUnderstood


@dataclass(frozen=True)
class Rule:
    """From a value, and the whole source, to an outcome.

    Attributes:
        any_value: whether `do` may be given None, and values that are not known (`Code`).
    """

    do: Callable[[Any, Source], Outcome]
    any_value: bool = False


class UnreadableError(Exception):
    """A value is not of the kind that the other engine takes; the text says what is."""


# -- kinds of values -----------------------------------------------------------------------------------------------


def whole(value: Any) -> int:
    """A whole number; also one that is written as 5e8."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnreadableError(f"{show(value)} is not a whole number")
    return value


def number(value: Any) -> float | int:
    """A number that is finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise UnreadableError(f"{show(value)} is not a number")
    return value


def flag(value: Any) -> bool:
    """True or False; also their names, which YAML files have."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise UnreadableError(f"{show(value)} is not True or False")
    return value


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise UnreadableError(f"{show(value)} is not a string")
    return value


def one_of(value: Any, allowed: Mapping[str, Any]) -> Any:
    """What `allowed` has for the string, in any case."""
    key = text(value).lower()
    if key not in allowed:
        raise UnreadableError(f"{show(value)} is not one of {', '.join(map(repr, allowed))}")
    return allowed[key]


def anything(value: Any) -> Any:
    """Whatever it is; halfmesh's own check of the config follows."""
    return value


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond float's range
        return False


# -- rules ---------------------------------------------------------------------------------------------------------


def to(key: str, kind: Callable[[Any], Any] = anything, look: str = "") -> Rule:
    """The same value under another key."""
    return Rule(lambda value, source: Converted({key: kind(value)}, look=look))


def done(says: str) -> Rule:
    """halfmesh does it without a key, whatever the value is."""
    return Rule(lambda value, source: Converted(says=says), any_value=True)


def no(reason: str) -> Rule:
    """No equivalent, whatever the value is."""
    return Rule(lambda value, source: Without(reason), any_value=True)


def lost(reason: str) -> Rule:
    """A precision or a way to shard, unless the value says that there is none."""

    def do(value: Any, source: Source) -> Outcome:
        is_off = value in (None, False, {}, "") or (type(value) is int and value <= 1)
        return Converted(says="off") if is_off else Lost(reason)

    return Rule(do, any_value=True)


def when(kind: Callable[[Any], Any], outcomes: Mapping[Any, Outcome], otherwise: Outcome | None = None) -> Rule:
    """An outcome for each value."""

    def do(value: Any, source: Source) -> Outcome:
        read = kind(value)
        if read in outcomes:
            return outcomes[read]
        if otherwise is None:
            raise UnreadableError(f"{show(value)} is not one of {', '.join(map(repr, outcomes))}")
        return otherwise

    return Rule(do)
