"""Which checkpoint is loaded: the newest whose files are as they were written, or the one that was named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, InputError, bullet_list, shorten
from ..log import get_logger
from ..parallel.context import ParallelContext
from . import folder as folders
from .folder import Manifest
from .together import together

_log = get_logger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files are as they were written."""

    folder: Path
    manifest: Manifest


def find(directory: Path, context: ParallelContext) -> Found:
    """The checkpoint in `directory`, or the newest of those in it. All ranks together.

    All of its files are read once, each by one of the ranks, and compared with their sha256.

    Raises:
        CheckpointError: there is none, or none that is whole; or a newer version of halfmesh wrote it.
        InputError: the ranks were given different folders.
    """
    if not context.agree(str(directory)):
        raise InputError("engine.load was called with different folders on each rank; give the same on all of them")
    what = f"loading from {directory} failed"
    named, candidates = together(context, what, lambda: _candidates(directory))
    damaged: list[str] = []
    for place in candidates:
        try:
            found = _read(place, what, context)
        except CheckpointError as error:
            if named or len(candidates) == 1:
                raise
            damaged.append(str(error).removeprefix(f"{what}: "))
            continue
        _refuse_other_format(found, what)
        if damaged and context.rank == 0:
            _log.warning("%s", bullet_list(f"{place} is loaded, because what is newer is damaged:", damaged))
        return found
    raise CheckpointError(bullet_list(f"{what}: all of its checkpoints are damaged:", damaged))


def holds_any(directory: Path, context: ParallelContext) -> bool:
    """Whether there is a checkpoint in `directory`, whole or damaged. All ranks together.

    Raises:
        CheckpointError: there is on some ranks only.
    """
    found = context.everyone(directory.is_dir() and bool(folders.checkpoints(directory)))
    if any(found) and not all(found):
        without = [rank for rank, there in enumerate(found) if not there]
        raise CheckpointError(
            f"{directory} has checkpoints, but not on rank(s) {shorten([str(rank) for rank in without])}; give a "
            "folder that all machines share"
        )
    return found[0]


def _candidates(directory: Path) -> tuple[bool, list[Path]]:
    """Whether `directory` is a checkpoint itself; and it, or those in it."""
    if (directory / folders.MANIFEST).exists():
        return True, [directory]
    found = folders.checkpoints(directory) if directory.is_dir() else []
    if directory.is_file():
        raise CheckpointError(
            "it is a file, and a checkpoint is a folder; for weights alone call engine.load_weights, of a file in a "
            "checkpoint name its folder"
        )
    if not found:
        there = "there is no such folder" if not directory.is_dir() else "it holds no complete checkpoint"
        raise CheckpointError(f"{there}; give the folder that engine.save was given, or one of those in it")
    return False, found


def _read(place: Path, what: str, context: ParallelContext) -> Found:
    """The checkpoint at `place`, all of whose files are as they were written."""
    manifest = together(context, what, lambda: Manifest.read(place))
    share = slice(context.rank, None, context.size)
    problems = together(context, what, lambda: folders.find_damage(place, manifest, share))
    everyone = sorted({problem for theirs in context.everyone(problems) for problem in theirs})
    if everyone:
        raise CheckpointError(
            bullet_list(f"{what}: {place} is not as it was written; take another checkpoint:", everyone)
        )
    return Found(place, manifest)


def _refuse_other_format(found: Found, what: str) -> None:
    """An older checkpoint beside it is not what was asked for."""
    if found.manifest.format != folders.FORMAT:
        raise CheckpointError(
            f"{what}: {found.folder} has the format {found.manifest.format!r}, and this version of halfmesh reads "
            f"format {folders.FORMAT}; load it with the version that wrote it, or a later one"
        )
