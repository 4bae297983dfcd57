"""From a file, a dict or a config to a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, cut, did_you_mean, show, show_name
from .config import Config, build, build_leniently
from .overrides import override
from .pyfile import run_config
from .text import read_json, read_yaml

SUFFIXES = (".py", ".yaml", ".yml", ".json")
_OWN_NAMES = "; a constant of your own is written in UPPERCASE"
_OWN_PY_NAMES = "; a constant of your own is written in UPPERCASE, a helper starts with an underscore"


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
    raw, hint = _read(source, overrides)
    return build(raw, _name(source) + (f" with {', '.join(overrides)}" if overrides else ""), hint)


def load_leniently(
    source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()
) -> tuple[Config | None, list[str]]:
    """The config of those top-level keys that are right (None if there is nothing to read), and all problems."""
    if isinstance(source, Config) and not overrides:
        return source, []
    try:
        raw, hint = _read(source, overrides)
    except ConfigError as error:
        return None, list(error.problems)
    return build_leniently(raw, hint)


def _name(source: object) -> str:
    if isinstance(source, (str, Path)):
        return show_name(str.__str__(source) if isinstance(source, str) else str(source), 400)
    return "the config"


def _read(source: object, overrides: Sequence[str]) -> tuple[Mapping[Any, Any], str]:
    raw, hint = read_raw(source)
    return (override(raw, overrides) if overrides else raw), hint


def read_raw(source: object) -> tuple[Mapping[Any, Any], str]:
    """The keys and values as they are, and how this kind of source writes names of its own."""
    if isinstance(source, Config):
        return source.to_dict(), _OWN_NAMES
    if isinstance(source, Mapping):
        return source, _OWN_NAMES
    if isinstance(source, (str, Path)):
        try:
            return _read_file(Path(str.__str__(source) if isinstance(source, str) else source).expanduser())
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # it may not be read, is no path, names no user's home
            reason = cut(f"{type(error).__name__}: {error}")
            raise ConfigError([f"it cannot be read ({reason})"], _name(source)) from error
    raise ConfigError(
        [f"a {type(source).__name__} was given, but a config is a path ({', '.join(SUFFIXES)}), a dict or a Config"]
    )


def _read_file(path: Path) -> tuple[Mapping[Any, Any], str]:
    if path.is_dir():
        raise ConfigError([_explain_missing(path)], _name(path))
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        near = did_you_mean(suffix, SUFFIXES)
        raise ConfigError([f"its suffix is {show(path.suffix)}; allowed: {', '.join(SUFFIXES)}{near}"], _name(path))
    if not path.is_file():
        raise ConfigError([_explain_missing(path)], _name(path))
    if suffix == ".py":
        return run_config(path), _OWN_PY_NAMES
    content = read_json(path) if suffix == ".json" else read_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(
            [f"its top level is of type {type(content).__name__}, but a config is a mapping of keys to values"],
            str(path),
        )
    return content, _OWN_NAMES


def _explain_missing(path: Path) -> str:
    if path.is_dir():
        return "it is a directory; give the config file in it"
    parent = path.resolve().parent
    if not parent.is_dir():
        return f"there is no such file, and no directory {parent}"
    others = [file.name for file in parent.iterdir() if file.suffix.lower() in SUFFIXES]
    return f"there is no such file in {parent}{did_you_mean(path.name, others)}"
