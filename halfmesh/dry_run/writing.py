"""Configs as Python files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.load import load_config
from ..config.text import as_python
from ..errors import InputError, readable
from ..parallel.registries import AXES

if TYPE_CHECKING:
    from ..config import Config
    from .rungs import Candidate, PlanRequest, Update


def short(config: dict[str, Any]) -> dict[str, Any]:
    """`config` in its shorthand forms: a size or a strategy instead of a dict with one key."""
    parallel = {}
    for name, keys in config.get("parallel", {}).items():
        key = "size" if name in AXES else "strategy"
        parallel[name] = keys[key] if isinstance(keys, dict) and list(keys) == [key] else keys
    found = dict(config) | ({"parallel": parallel} if parallel else {})
    checkpoint = found.get("activation_checkpoint")
    if checkpoint in ({"every": 1}, {"every": 1, "selective": True}):
        found["activation_checkpoint"] = "selective" if checkpoint.get("selective") else "full"
    return found


def refuse_target(option: str, path: Path, suffix: str, may_replace: bool) -> None:
    """Check that a file can be written to `path`, before anything is computed for it.

    Raises:
        InputError: another suffix, a directory that does not exist, or a file that does and may not be replaced.
    """
    if path.suffix.lower() != suffix:
        raise InputError(f"{option} {path}: give a name that ends in {suffix}")
    if not path.resolve().parent.is_dir():
        raise InputError(f"{option} {path}: there is no directory {path.resolve().parent}")
    if path.exists() and not may_replace:
        raise InputError(f"{option} {path}: the file exists; --force replaces it")


def config_text(rung: Candidate, asked: PlanRequest, update: Update) -> str:
    """The config of `rung` as a .py file, with comments on its purpose and its memory."""
    lines = [
        f"# Made by halfmesh plan for {asked.model} on {asked.world_size} rank(s) of {readable(asked.limit)}, AdamW.",
        f"# Give each data rank's loader a batch size of {rung.rows}; an update takes {update.rows} rows in all.",
        f"# In a dry run a rank needed {readable(rung.needs)}.",
        "",
        *(f"{key} = {as_python(value)}" for key, value in short(rung.config.to_dict()).items()),
    ]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str, config: Config) -> None:
    """Write `text`, and read it again.

    Raises:
        InputError: the file does not load as `config`.
    """
    path.write_text(text, encoding="utf-8")
    if load_config(path) != config:
        raise InputError(
            f"--out {path}: the file does not load as the chosen config, because one of your constants has no literal "
            "form; add the changed keys to your own file instead"
        )
