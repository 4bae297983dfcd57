"""Loads a config from a file, a dict or another config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, did_you_mean, show
from .config import OWN_NAMES, Config, build
from .overrides import override
from .pyfile import run_config
from .text import read_json, read_yaml

SUFFIXES = (".py", ".yaml", ".yml", ".json")


def load_config(source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
    """The config of a .py, .yaml, .yml or .json file, or of a dict; a Config is returned as it is.

    Args:
        overrides: keys to set in it: "parallel.tensor=2", "fp16.mode=naive", "NUM_EPOCHS=3". A dot leads into a dict;
            values are written as in YAML, where `null` is None. `--set` of `get_default_parser` collects them.

    Raises:
        ConfigError: with all problems at once.
    """
    if isinstance(source, Config) and not overrides:
        return source
    raw, hint = read_raw(source)
    name = _name(source) + (f" with {', '.join(overrides)}" if overrides else "")
    return build(override(raw, overrides) if overrides else raw, name, hint)


def _name(source: object) -> str:
    return str(source) if isinstance(source, (str, Path)) else "the config"


def read_raw(source: object) -> tuple[Mapping[Any, Any], str]:
    """The keys and values, and a hint how this kind of source names constants and helpers."""
    if isinstance(source, Config):
        return source.to_dict(), OWN_NAMES
    if isinstance(source, Mapping):
        return source, OWN_NAMES
    if not isinstance(source, (str, Path)):
        kinds = f"a path ({', '.join(SUFFIXES)}), a dict or a Config"
        raise ConfigError([f"a {type(source).__name__} was given, but a config is {kinds}"])
    path = Path(source).expanduser()
    try:
        if problem := _find_problem(path):
            raise ConfigError([problem], _name(source))
        if path.suffix.lower() == ".py":
            return run_config(path), f"{OWN_NAMES}, a helper starts with an underscore"
        content = read_json(path) if path.suffix.lower() == ".json" else read_yaml(path)
    except OSError as error:
        raise ConfigError([f"it cannot be read ({type(error).__name__}: {error})"], _name(source)) from error
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise ConfigError(
            [f"its top level is of type {kind}, but a config is a mapping of keys to values"], _name(source)
        )
    return content, OWN_NAMES


def _find_problem(path: Path) -> str:
    """Why `path` cannot be read; empty if it can."""
    if path.suffix.lower() not in SUFFIXES:
        near = did_you_mean(path.suffix, SUFFIXES)
        return f"its suffix is {show(path.suffix)}; allowed: {', '.join(SUFFIXES)}{near}"
    if path.is_file():
        return ""
    parent = path.resolve().parent
    others = [file.name for file in parent.glob("*") if file.suffix.lower() in SUFFIXES]
    return f"there is no such file in {parent}{did_you_mean(path.name, others)}"
