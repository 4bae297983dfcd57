"""A folder of checkpoints. A checkpoint gets its name only when it is complete.

checkpoints/
    .lock                 locked by the job that saves here
    .step-00001300.tmp/   being written, or left by a save that was killed
    step-00001200/
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ..errors import CheckpointError, bullet_list
from ..parallel.mesh import ParallelContext
from ..parallel.rank_checks import run_on_rank_zero
from ..utils.log import get_logger
from . import storage

_log = get_logger(__name__)

LOCK = ".lock"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d{8,}(?:\.\d+)?\.tmp")


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, the newest first."""
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for match, path in sorted(found, key=lambda one: _order(one[0]), reverse=True)]


def _order(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1]), int(match[2] or 0)


def begin(folder: Path, step: int) -> Path:
    """Create an empty folder for the checkpoint of `step`, and remove the remains of killed saves."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            _remove(path)
    names = [path.name.removeprefix(".").removesuffix(".tmp") for path in folder.iterdir()]
    taken = [_order(match)[1] for name in names if (match := _NAME.fullmatch(name)) and int(match[1]) == step]
    again = f".{max(taken) + 1}" if taken else ""  # nothing is replaced
    unfinished = folder / f".step-{step:08d}{again}.tmp"
    unfinished.mkdir()
    return unfinished


def final_place(unfinished: Path) -> Path:
    """The path of a checkpoint that `begin` began, when it is complete."""
    return unfinished.with_name(unfinished.name[1:].removesuffix(".tmp"))


def finish(unfinished: Path, keep: int | None) -> None:
    """Give a complete checkpoint its name, and remove older ones of the same model and engine.

    Args:
        keep: the number to keep, this one included; None: all, but one for each step.
    """
    storage.sync(unfinished)
    final = final_place(unfinished)
    unfinished.rename(final)
    storage.sync(final.parent)
    step, model = final.name.partition(".")[0], _model(final)
    older = [path for path in checkpoints(final.parent) if path != final and _model(path) == model]
    same_step = [path for path in older if path.name.partition(".")[0] == step]
    rest = [path for path in older if path not in same_step]
    kept = rest if keep is None else rest[: keep - 1]
    for path in [*same_step, *rest[len(kept) :]]:
        _remove(path)
    if kept and kept[0].name > final.name:  # the run went back to an earlier checkpoint
        _log.warning(
            "%s was saved beside %s, which is of a later step: the folder, and resume='auto', would load that one; if "
            "you went back on purpose, remove it, or save into another folder",
            final,
            kept[0].name,
        )


def _model(path: Path) -> tuple[Any, Any] | None:
    """The model of a checkpoint, and its engine's name. None: `path` is no checkpoint of halfmesh."""
    try:
        manifest = storage.read_manifest(path)
    except (CheckpointError, OSError):
        return None
    return None if manifest["format"] != storage.FORMAT else (manifest["model"], engine_name(manifest))


def engine_name(manifest: Mapping[str, Any]) -> Any:
    """The config key `name` of the run that wrote a checkpoint."""
    return manifest["config"].get("name")


def _remove(path: Path) -> None:
    """Remove a checkpoint that is no longer needed. A failure here does not fail a complete save."""
    try:
        if not _UNFINISHED.fullmatch(path.name):  # first, so that no incomplete one has the name of a complete one
            path = path.rename(path.with_name(f".{path.name}.tmp"))
        shutil.rmtree(path)
    except OSError as error:
        _log.warning("%s is no longer needed, but cannot be removed (%s); remove it yourself", path, error)


def find(directory: Path, context: ParallelContext) -> tuple[Path, dict[str, Any]]:
    """The checkpoint in `directory`, or the newest intact one of those in it, and its manifest. All ranks together.

    Raises:
        CheckpointError: there is none, or none that is intact; or a newer version of halfmesh wrote it.
    """
    what = f"loading from {directory} failed"
    candidates = run_on_rank_zero(context, what, lambda: _candidates(directory))
    damaged: list[str] = []
    for place in candidates:
        try:
            manifest = storage.read_whole(place, what, context)
        except CheckpointError as error:
            if len(candidates) == 1:
                raise
            damaged.append(str(error).removeprefix(f"{what}: "))
            continue
        if manifest["format"] != storage.FORMAT:  # an older checkpoint in the folder is not the one requested
            raise CheckpointError(
                f"{what}: {place} has the format {manifest['format']!r}, and this version of halfmesh reads format "
                f"{storage.FORMAT}; load it with the version that wrote it, or a later one"
            )
        if damaged:
            _log.warning("%s", bullet_list(f"{place} is loaded, because newer checkpoints are damaged:", damaged))
        return place, manifest
    raise CheckpointError(bullet_list(f"{what}: all of its checkpoints are damaged:", damaged))


def _candidates(directory: Path) -> list[Path]:
    """`directory`, if it is a checkpoint itself; or those in it."""
    if (directory / storage.MANIFEST).exists():
        return [directory]
    found = checkpoints(directory) if directory.is_dir() else []
    if not found:
        there = "it holds no complete checkpoint" if directory.is_dir() else "there is no such folder"
        raise CheckpointError(f"{there}; give the folder that engine.save was given, or one of those in it")
    return found


# -- one job saves into a folder ---------------------------------------------------------------------------------------


def lock(folder: Path, held: dict[Path, IO[str]]) -> None:
    """Lock `folder`, which is created if missing, for this process: a second job would remove the unfinished saves
    and the checkpoints of the first. Call it before each save: another engine of this process may have unlocked it.

    A POSIX lock belongs to a process, however that ends: several engines of one process share a folder, and forked
    DataLoader workers that outlive it do not keep it locked.

    Args:
        held: the files of the folders that an engine has locked; `folder` is added. Closing them ends the locks.

    Raises:
        CheckpointError: another process saves into it.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if folder not in held:
        held[folder] = open(folder / LOCK, "a+")  # noqa: SIM115
    file = held[folder]
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise CheckpointError(
            f"another job saves into {folder} ({file.read(200)}), and each would remove checkpoints of the other; end "
            f"that job first, or give this one another folder. (If its machine is gone, remove {folder / LOCK}.)"
        ) from None
    except OSError as error:
        _log.warning("%s cannot be locked (%s); make sure that no other job saves there", folder, error)
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
