"""What a user gives as plain data: bounded, without cycles, its names and strings without classes of their own.

Everything after this may walk it, compare it and print it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from ..errors import cut, show, show_name
from .problems import Problem

MOST_LEVELS = 100
MOST_VALUES = 10_000_000
"""Counted as if what stands in several places were there as often: copying and writing it takes as long."""

_CONTAINERS = (dict, list, tuple, set, frozenset)


def make_plain(raw: Mapping[Any, Any], settings: Any) -> tuple[dict[str, Any], list[Problem]]:
    """The keys and values of `raw`, as far as they can be used, and what is wrong with the others.

    Args:
        settings: names of the keys of which the values are settings; others are the user's own, and only copied.
    """
    found: dict[str, Any] = {}
    problems = []
    for key, value in raw.items():
        if not isinstance(key, str):
            line = f"{show(key)}: keys must be strings, not {type(key).__name__}"
            problems.append(Problem((show(key),), line))
            continue
        name = str.__str__(key)
        try:
            refuse_endless(value)
            found[name] = _plain(value) if name in settings else copied(value)
        except Exception as error:  # what a value's own class raises, when it is read or copied
            problems.append(Problem((name,), f"{show_name(name)}: cannot be used: {cut(_reason(error))}"))
    return found, problems


def _reason(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def refuse_endless(value: Any) -> None:
    """Raise ValueError if containers in `value` contain themselves, or more than anything could be done with."""
    level, count = [value] if isinstance(value, _CONTAINERS) else [], 0
    for _ in range(MOST_LEVELS):
        inner: list[Any] = []
        for container in level:
            children = list(_children(container))
            count += len(children)
            if count > MOST_VALUES:
                raise ValueError(f"it holds more than {MOST_VALUES} values, each counted as often as it is there")
            inner += [child for child in children if isinstance(child, _CONTAINERS)]
        level = inner
        if not level:
            return
    raise ValueError(f"it contains itself, or is nested more than {MOST_LEVELS} levels deep")


def _children(container: Any) -> Iterator[Any]:
    return chain(container.keys(), container.values()) if isinstance(container, dict) else iter(container)


def _plain(value: Any) -> Any:
    """`value` with strings and mappings of the built-in classes; other objects as they are."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value


def copied(value: Any) -> Any:
    """`value` with its containers copied, all the way down; what they hold is shared.

    Containers of classes of their own are copied deeply, or where that fails without what they hold, say a lock.
    """
    if type(value) in (list, tuple, set):
        return type(value)(copied(item) for item in value)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if not isinstance(value, (list, dict, set)):
        return value
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError):
        return copy.copy(value)
