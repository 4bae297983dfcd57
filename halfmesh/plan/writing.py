"""A config as a user would write it in Python."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.load import load_config
from ..errors import InputError, readable
from ..parallel.registries import AXES

if TYPE_CHECKING:
    from ..config import Config
    from .rungs import Asked, Rung, Update


def as_python(config: dict[str, Any], comment: str) -> str:
    """Assignments, below a comment."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*lines, "", *(f"{key} = {_show(value)}" for key, value in config.items())]) + "\n"


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return f"dict({', '.join(f'{key}={_show(item)}' for key, item in value.items())})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def describe(rung: Rung, asked: Asked, update: Update) -> str:
    """What a config was made for, and what it needs."""
    return "\n".join(
        [
            f"Made by halfmesh plan for {asked.model} on {asked.world_size} rank(s) of {readable(asked.limit)}, AdamW.",
            f"Each data rank's loader has to give batches of {rung.rows} row(s); an update takes {update.rows} in all.",
            f"In a dry run a rank needed {readable(rung.needs)}.",
        ]
    )


def short(config: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults, in the shorthand forms: a size or a strategy in place of a dict with one key."""
    parallel = {}
    for name, keys in config.get("parallel", {}).items():
        key = "size" if name in AXES else "strategy"
        parallel[name] = keys[key] if isinstance(keys, dict) and list(keys) == [key] else keys
    found = dict(config) | ({"parallel": parallel} if parallel else {})
    checkpoint = found.get("activation_checkpoint")
    if checkpoint in ({"every": 1}, {"every": 1, "selective": True}):
        found["activation_checkpoint"] = "selective" if checkpoint.get("selective") else "full"
    return found


def refuse_path(path: Path, may_replace: bool) -> None:
    """Before anything is searched: whether the config can be written there.

    Raises:
        InputError: its ending is not .py, or see `refuse_target`.
    """
    if path.suffix != ".py":
        raise InputError(f"--out {path}: the config is written as Python; give a name that ends in .py")
    refuse_target(path, "--out", may_replace)


def refuse_target(path: Path, option: str, may_replace: bool) -> None:
    """Whether a file can be written there, before anything is computed for it.

    Raises:
        InputError: the file is there already and may not be replaced, its directory is not there, it is a directory
            itself, or one of them cannot be written to.
    """
    folder = path.resolve().parent
    if path.is_dir():
        raise InputError(f"{option} {path}: this is a directory; name a file in it")
    if not folder.is_dir():
        raise InputError(f"{option} {path}: there is no directory {folder}")
    if path.exists() and not may_replace:
        raise InputError(f"{option} {path}: the file exists; --force replaces it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{option} {path}: it cannot be written; you need the right to, or another place")


def put(path: Path, text: str) -> None:
    """Raises InputError if the file cannot be written after all: a full disk, say."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path} could not be written ({error}); give another place") from error


def config_text(rung: Rung, asked: Asked, update: Update) -> str:
    """The config of `rung` as a .py file."""
    return as_python(short(rung.config.to_dict()), describe(rung, asked, update))


def write(path: Path, text: str, config: Config) -> None:
    """Write `text`, and read it again.

    Raises:
        InputError: it cannot be written, or does not say the same as `config`.
    """
    put(path, text)
    if load_config(path) != config:
        raise InputError(
            f"--out {path}: the file does not read as the chosen config, because a constant of yours cannot be "
            "written; add the changed keys to your own file instead"
        )
