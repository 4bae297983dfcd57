"""YAML and JSON in and out. Python tuples survive YAML; 1e-3 is a number; a key that is given twice is an error."""

from __future__ import annotations

import enum
import json
import re
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, cut, show

_MOST_NODES = 1_000_000
_TUPLE = "tag:yaml.org,2002:python/tuple"
_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
"""Numbers with an exponent, as YAML 1.2 has them. PyYAML's YAML 1.1 wants a point and a sign: 1e-3 is text there."""


class UnwritableError(TypeError):
    """YAML cannot hold a value."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with tuples, which refuses a key that is given twice (plain YAML keeps the last), and aliases that
    stand for more than could ever be meant."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark
        node = super().compose_node(parent, index)
        if is_alias and node not in self._sizes:
            raise yaml.MarkedYAMLError(problem="an alias stands within what it is an alias of", problem_mark=mark)
        if node is not None and not is_alias:
            size = self._sizes[node] = 1 + sum(self._sizes[part] for part in _parts(node))
            if size > _MOST_NODES:
                problem = f"with aliases written out it holds more than {_MOST_NODES} values"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return node

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


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _construct_tuple(loader: _Loader, node: yaml.SequenceNode) -> tuple[Any, ...]:
    return tuple(loader.construct_sequence(node, deep=True))


for _yaml in (_Loader, _Dumper):  # the dumper, too: it puts a string in quotes where the loader would see a number
    _yaml.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))
_Loader.add_constructor(_TUPLE, _construct_tuple)
_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_sequence(_TUPLE, value, flow_style=True))
_Dumper.add_multi_representer(enum.StrEnum, lambda dumper, value: dumper.represent_str(value.value))
_Dumper.add_multi_representer(enum.IntEnum, lambda dumper, value: dumper.represent_int(value.value))


def to_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML.

    Raises:
        UnwritableError: a value is of a type that YAML does not have; the message names its key.
    """
    for key, value in values.items():
        try:
            yaml.dump({key: value}, Dumper=_Dumper)
        except yaml.representer.RepresenterError as error:
            culprit = error.args[-1]
            raise UnwritableError(
                f"{key}: YAML cannot hold {show(culprit)} ({type(culprit).__name__}); "
                "use numbers, strings, lists, tuples, sets and dicts, or keep this config in a .py file"
            ) from None
        except ValueError as error:
            raise UnwritableError(f"{key}: YAML cannot hold it ({error}); keep this config in a .py file") from None
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False) if values else "{}\n"


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; an empty file is an empty config.

    Raises:
        ConfigError: the file is not valid YAML.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            content = yaml.load(file, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError([f"not valid YAML: {line}{cut(str(error.problem))}"], str(path)) from error
    except OSError:
        raise
    except Exception as error:  # an illegal character, a value that its tag cannot hold, a thousand brackets
        reason = cut(str(error) or type(error).__name__)
        raise ConfigError([f"not valid YAML: {reason}"], str(path)) from error
    return {} if content is None else content


def read_value(text: str) -> Any:
    """A single value as YAML reads it: `2`, `true`, `1e-3`, `[a, b]`, `{size: 2}`; other text is itself.

    Raises:
        ValueError: it is not valid YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{show(text)} is not valid YAML; put a text with such signs in quotes") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ConfigError: the file is not valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigError([f"not valid JSON: line {error.lineno}: {error.msg}"], str(path)) from error
    except ValueError as error:
        raise ConfigError([f"not valid JSON: {error}"], str(path)) from error
    except RecursionError as error:
        raise ConfigError(["it is nested too deep to be read"], str(path)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"{show(key)} is given twice")
        seen[key] = value
    return seen
