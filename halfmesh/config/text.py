"""Configs as text: YAML and JSON in, YAML and Python out.

Python tuples survive YAML; 1e-3 is a number; a key that is given twice is an error.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, cut, show

_TUPLE = "tag:yaml.org,2002:python/tuple"
_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
"""Numbers with an exponent, as in YAML 1.2. In PyYAML's YAML 1.1 they need a point and a sign: 1e-3 is text."""


class UnreadableError(ConfigError):
    """The file of a config cannot be read: it does not exist, or has no keys and values."""

    def __init__(self, problem: str, source: str) -> None:
        super().__init__([problem], source)
        self.args = (f"cannot read {source}: {problem}",)


class _Loader(yaml.SafeLoader):
    """Safe YAML with tuples, which rejects a repeated key (PyYAML keeps the last)."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # before merge keys are resolved: overriding one is no repetition
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{show(key.value)} is given twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return node


class _Dumper(yaml.SafeDumper):
    """Safe YAML with tuples, and enumerations of strings and integers as their values."""


def _construct_tuple(loader: _Loader, node: yaml.SequenceNode) -> tuple[Any, ...]:
    return tuple(loader.construct_sequence(node, deep=True))


for _yaml in (_Loader, _Dumper):  # also the dumper, which puts a string in quotes where the loader would see a number
    _yaml.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))
_Loader.add_constructor(_TUPLE, _construct_tuple)
_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_sequence(_TUPLE, value, flow_style=True))
_Dumper.add_multi_representer(enum.StrEnum, lambda dumper, value: dumper.represent_str(value.value))
_Dumper.add_multi_representer(enum.IntEnum, lambda dumper, value: dumper.represent_int(value.value))


def as_python(value: Any) -> str:
    """`value` as a literal for a .py config; a dict of names becomes dict(...)."""
    if type(value) is dict and value and all(isinstance(key, str) and _is_name(key) for key in value):
        return f"dict({', '.join(f'{key}={as_python(item)}' for key, item in value.items())})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


def as_json(value: Any, depth: int = 16) -> Any:
    """`value` in JSON types. What has none (a class, a tensor, an infinite number) is text without addresses, so that
    two runs write the same; and so is what lies deeper than `depth`, which may hold itself."""
    if isinstance(value, Mapping) and depth:
        return {key if isinstance(key, str) else _text(key): as_json(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and depth:
        return [as_json(item, depth - 1) for item in value]
    if isinstance(value, enum.Enum):
        return as_json(value.value, depth)
    if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value) if isinstance(value, (float, Path)) else _text(value)


def _is_name(key: str) -> bool:
    return key.isidentifier() and not iskeyword(key)


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", show(value))


def to_yaml(values: Mapping[str, Any]) -> str:
    """`values` as YAML.

    Raises:
        ConfigError: YAML cannot hold a value (an object, a function); the message names its key.
    """
    lines = []
    for key, value in values.items():
        try:
            lines.append(yaml.dump({key: value}, Dumper=_Dumper))
        except yaml.representer.RepresenterError as error:
            line = (
                f"{key}: YAML cannot hold {show(error.args[-1])}; use numbers, strings, lists, tuples, sets and dicts"
            )
            raise ConfigError([line], "the YAML form of the config") from None
    return "".join(lines) or "{}\n"


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; an empty file is an empty config.

    Raises:
        UnreadableError: the file is not valid YAML.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            content = yaml.load(file, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # a mistake, an illegal character, a date that does not exist
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}" if mark else str(error)  # type: ignore[union-attr]
        raise UnreadableError(f"not valid YAML: {cut(line)}", str(path)) from error
    return {} if content is None else content


def read_value(text: str) -> Any:
    """A single value as YAML reads it: `2`, `true`, `1e-3`, `[a, b]`, `{size: 2}`; other text is itself.

    Raises:
        ValueError: it is not valid YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{show(text)} is not valid YAML; put text with such signs in quotes") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UnreadableError: the file is not valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique)
    except ValueError as error:
        raise UnreadableError(f"not valid JSON: {error}", str(path)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise ValueError(f"{show(key)} is given twice")
    return dict(pairs)
