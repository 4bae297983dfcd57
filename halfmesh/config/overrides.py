"""Overrides such as `parallel.tensor=2`, from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..errors import ConfigError, show
from .text import read_value

_SHORT = MappingProxyType(
    {
        "parallel.tensor": "size",
        "parallel.pipeline": "size",
        "parallel.data": "strategy",
        "clip_grad_norm": "max_norm",
        "compile": "enabled",
        "checkpoint": "directory",
    }
)
"""The key that a shorthand value sets (tensor=2 is tensor=dict(size=2)), so that others can be added to it."""


def override(raw: Mapping[Any, Any], overrides: Sequence[str]) -> dict[Any, Any]:
    """`raw` with the overrides applied in order, as a new dict.

    Args:
        overrides: `key=value` each. A dot leads into a dict (`fp16.mode=naive`); the value is read as in YAML: `2`,
            `1e-3`, `true`, `null`, `naive`, `{size: 2, microbatches: 4}`.

    Raises:
        ConfigError: one has no `=`, a value that is not YAML, or a path into something that is not a dict.
    """
    found, problems = dict(raw), list[str]()
    for text in overrides:
        path, separator, value = text.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            problems.append(f"{show(text)}: an override is key=value, such as parallel.tensor=2 or fp16.mode=naive")
            continue
        try:
            _set(found, keys, read_value(value))
        except ValueError as error:
            problems.append(f"{text}: {error}")
    if problems:
        raise ConfigError(problems, "the overrides")
    return found


def _set(inside: dict[Any, Any], keys: Sequence[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        path, given = ".".join(keys[: depth + 1]), inside.get(key)
        if isinstance(given, Mapping):
            given = dict(given)
        elif given is None:
            given = {}
        elif path in _SHORT:
            given = {_SHORT[path]: given}
        else:
            raise ValueError(f"{path} is {show(given)}, which has no keys; set all of it: {path}={{...}}")
        inside[key] = given
        inside = given
    inside[keys[-1]] = value
