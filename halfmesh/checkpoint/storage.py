"""How checkpoints lie in a folder: complete under their name, or not at all; and one job saves into it.

checkpoints/
    .lock                 while a job saves here
    step-00001200/
        manifest.json     format, versions, layout, device, model, config, its sha256; size and sha256 of other files
        .metadata         of torch.distributed.checkpoint
        __0_0.distcp      tensors that rank 0 has written
        common.pt         what is the same on all ranks
        rank-00000.pt     what is not: random numbers
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, InputError, bullet_list, shorten
from ..log import get_logger
from ..parallel.context import ParallelContext
from .collective import run_on_all_ranks

_log = get_logger(__name__)

FORMAT = 1
"""Raised by what an older reader cannot read."""
MANIFEST = "manifest.json"
COMMON = "common.pt"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d{8,}(?:\.\d+)?\.tmp")


# -- files -------------------------------------------------------------------------------------------------------------


def rank_file(rank: int) -> str:
    """The name of the file with what only this rank has."""
    return f"rank-{rank:05d}.pt"


def as_bytes(content: Mapping[str, Any]) -> bytes:
    """Plain values and tensors as they stand in a file.

    Raises:
        InputError: something in `content` is an object that only code could make again.
    """
    for key, value in content.items():
        refuse_objects(key, value)
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def refuse_objects(key: str, value: Any) -> None:
    """Raise InputError if `value`, the state of `key`, could not be read again."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"the state of {key} holds objects that are not plain values or tensors, which are not read back because "
            f"that could run code ({reason}); keep them out of its state_dict, or save them yourself"
        ) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file; on disk when this returns."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- the manifest ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """What stands in `manifest.json`.

    Attributes:
        files: size in bytes and sha256 of every other file, by name.
        about: the run: step, layout, device, model (a digest of names and shapes), config, versions.
        format: of the checkpoint; where it is another than `FORMAT`, the rest is empty.
    """

    files: Mapping[str, tuple[int, str]]
    about: Mapping[str, Any]
    format: Any = FORMAT

    def write(self, folder: Path) -> None:
        """Make it the manifest of `folder`, on disk when this returns."""
        content = json.loads(json.dumps({"format": FORMAT, "files": self.files, **self.about}))
        write_file(folder / MANIFEST, json.dumps(content | {"sha256": _digest(content)}, indent=1).encode())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of `folder`.

        Raises:
            CheckpointError: there is none, it is damaged, or names a file outside of its folder.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            saved_as = content["format"]
            if saved_as != FORMAT:
                return Manifest({}, {}, saved_as)
            if content.pop("sha256") != _digest(content):
                raise ValueError("its content has another sha256 than when it was written")
            files = {name: (size, digest) for name, (size, digest) in content.pop("files").items()}
            outside = [name for name in files if Path(name).name != name or (folder / name).is_symlink()]
            if outside:
                raise ValueError(f"it names {outside[0]!r}, which is not a file of the folder itself")
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise CheckpointError(f"{path} is damaged ({reason}); take another checkpoint") from error
        return Manifest(files, content)

    @property
    def engine_name(self) -> str | None:
        """What the config key `name` was."""
        config = self.about.get("config")
        return config.get("name") if isinstance(config, dict) else None


def _digest(content: Mapping[str, Any]) -> str:
    """sha256 of what stands in a manifest, besides itself."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe(folder: Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Size and sha256 of files in `folder`. Reads all of them: 1 to 2 GB/s where the processor knows sha256."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = os.fstat(file.fileno()).st_size, digest
    return found


def _find_damage(folder: Path, manifest: Manifest, share: slice) -> list[str]:
    """What is wrong with the files of `folder`, of which this rank looks at a share."""
    problems = []
    for name, (size, digest) in sorted(manifest.files.items())[share]:
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif describe(folder, [name])[name][1] != digest:
            problems.append(f"{name} has another sha256 than when it was written")
    return problems


# -- the folder --------------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that were finished, the newest first."""
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for match, path in sorted(found, key=lambda one: _order(one[0]), reverse=True)]


def _order(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1]), int(match[2] or 0)


def begin(folder: Path, step: int) -> Path:
    """Make an empty folder for the checkpoint of `step`, and remove what saves left that did not come to their end."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            _remove(path)
    names = [path.name.removeprefix(".").removesuffix(".tmp") for path in folder.iterdir()]
    taken = [_order(match)[1] for name in names if (match := _NAME.fullmatch(name)) and int(match[1]) == step]
    again = f".{max(taken) + 1}" if taken else ""  # never in the place of anything
    unfinished = folder / f".step-{step:08d}{again}.tmp"
    unfinished.mkdir()
    return unfinished


def final_place(unfinished: Path) -> Path:
    """Where a checkpoint that `begin` began is when it is complete."""
    return unfinished.with_name(unfinished.name[1:].removesuffix(".tmp"))


def finish(unfinished: Path, keep: int | None) -> None:
    """Give a complete checkpoint its name, and remove those that it takes the place of. Folders without a manifest,
    checkpoints of another model and links stay; so does what cannot be removed, with a warning.

    Args:
        keep: how many to keep, this one included; None: all, but one for each step.
    """
    sync(unfinished)
    final = final_place(unfinished)
    unfinished.rename(final)
    sync(final.parent)
    step = final.name.partition(".")[0]
    model = _model(final)
    older = [path for path in checkpoints(final.parent) if path != final and _model(path) == model]
    same = [path for path in older if path.name.partition(".")[0] == step]
    rest = [path for path in older if path not in same]
    for path in same + ([] if keep is None else rest[keep - 1 :]):
        _remove(path)


def _model(path: Path) -> tuple[Any, str | None] | None:
    """The model that the checkpoint at `path` is of, and its engine's name; None: it is none of ours."""
    try:
        if path.is_symlink():
            return None
        manifest = Manifest.read(path)
        return manifest.about.get("model"), manifest.engine_name
    except (CheckpointError, OSError):
        return None


def _remove(path: Path) -> None:
    """Remove what is no longer needed. A save that is complete does not fail because that cannot be done."""
    try:
        if not _UNFINISHED.fullmatch(path.name):  # first, so that no half of one has the name of a whole one
            path = path.rename(path.with_name(f".{path.name}.tmp"))
        shutil.rmtree(path)
    except OSError as error:
        words = "%s is no longer needed and cannot be removed (%s: %s); remove it yourself"
        _log.warning(words, path, type(error).__name__, error)


# -- which one is loaded -----------------------------------------------------------------------------------------------


def find(directory: Path, context: ParallelContext) -> tuple[Path, Manifest]:
    """The checkpoint in `directory`, or the newest of those in it. All ranks together.

    All of its files are read once, each by one of the ranks, and compared with their sha256.

    Raises:
        CheckpointError: there is none, or none that is whole; or a newer version of halfmesh wrote it.
        InputError: the ranks were given different folders.
    """
    if not context.agree(str(directory)):
        raise InputError("engine.load was called with different folders on each rank; give the same on all of them")
    what = f"loading from {directory} failed"
    named, candidates = run_on_all_ranks(context, what, lambda: _candidates(directory))
    damaged: list[str] = []
    for place in candidates:
        try:
            manifest = _read_whole(place, what, context)
        except CheckpointError as error:
            if named or len(candidates) == 1:
                raise
            damaged.append(str(error).removeprefix(f"{what}: "))
            continue
        if manifest.format != FORMAT:  # an older checkpoint beside it is not what was asked for
            raise CheckpointError(
                f"{what}: {place} has the format {manifest.format!r}, and this version of halfmesh reads format "
                f"{FORMAT}; load it with the version that wrote it, or a later one"
            )
        if damaged:
            _log.warning("%s", bullet_list(f"{place} is loaded, because what is newer is damaged:", damaged))
        return place, manifest
    raise CheckpointError(bullet_list(f"{what}: all of its checkpoints are damaged:", damaged))


def holds_any(directory: Path, context: ParallelContext) -> bool:
    """Whether there is a checkpoint in `directory`, whole or damaged. All ranks together.

    Raises:
        CheckpointError: there is on some ranks only.
    """
    found = context.everyone(directory.is_dir() and bool(checkpoints(directory)))
    if any(found) and not all(found):
        without = [rank for rank, there in enumerate(found) if not there]
        raise CheckpointError(
            f"{directory} has checkpoints, but not on rank(s) {shorten([str(rank) for rank in without])}; give a "
            "folder that all machines share"
        )
    return found[0]


def _candidates(directory: Path) -> tuple[bool, list[Path]]:
    """Whether `directory` is a checkpoint itself; and it, or those in it."""
    if (directory / MANIFEST).exists():
        return True, [directory]
    if directory.is_file():
        raise CheckpointError(
            "it is a file, and a checkpoint is a folder; for weights alone call engine.load_weights, of a file in a "
            "checkpoint name its folder"
        )
    found = checkpoints(directory) if directory.is_dir() else []
    if not found:
        there = "there is no such folder" if not directory.is_dir() else "it holds no complete checkpoint"
        raise CheckpointError(f"{there}; give the folder that engine.save was given, or one of those in it")
    return False, found


def _read_whole(place: Path, what: str, context: ParallelContext) -> Manifest:
    """The manifest of the checkpoint at `place`, all of whose files are as they were written."""
    manifest = run_on_all_ranks(context, what, lambda: Manifest.read(place))
    share = slice(context.rank, None, context.size)
    problems = run_on_all_ranks(context, what, lambda: _find_damage(place, manifest, share))
    everyone = sorted({problem for theirs in context.everyone(problems) for problem in theirs})
    if everyone:
        raise CheckpointError(
            bullet_list(f"{what}: {place} is not as it was written; take another checkpoint:", everyone)
        )
    return manifest
