"""Reads and writes checkpoints on disk. All ranks write a checkpoint together. It gets its name when it is complete.
A load first compares the sha256 of its files.

checkpoints/
    .lock                 locked by the job that saves here
    .step-00001300.tmp/   being written, or left by a save that was killed
    step-00001200/
        manifest.json     format, step, layout, device, model, config, versions; size and sha256 of the other files
        .metadata         of torch.distributed.checkpoint
        __0_0.distcp      tensors that rank 0 has written
        common.pt         state that is the same on all ranks
        rank-00000.pt     state that is not: random numbers, position in the data
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import CheckpointError, HalfmeshError, InputError, bullet_list, readable, shorten
from ..parallel.mesh import ParallelContext
from ..utils.log import get_logger
from .agreement import StoreMessages, gather_results, run_on_all_ranks, run_on_rank_zero
from .full_state import WholeTensor
from .state import Boxes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_log = get_logger(__name__)

# .dcp imports torch.distributed.checkpoint: only when there is something to save or load.

FORMAT = 1
"""Increased with each change that an older reader cannot read."""
MANIFEST = "manifest.json"
COMMON = "common.pt"
LOCK = ".lock"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d{8,}(?:\.\d+)?\.tmp")


# -- one checkpoint ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, before it is written."""

    tensors: dict[str, WholeTensor]
    boxes: Boxes  # those that this rank writes
    common: bytes  # common.pt
    own: bytes  # rank-00000.pt
    about: Mapping[str, Any]  # for the manifest


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose files are intact, with the content of the small ones."""

    folder: Path
    manifest: Mapping[str, Any]
    metadata: Metadata
    common: Mapping[str, Any]
    first: Mapping[str, Any]  # of rank 0
    own: Mapping[str, Any] | None  # of the rank with this rank's number, if there was one

    @property
    def tensors(self) -> dict[str, Any]:
        """DCP's description of each tensor, by its full name."""
        return self.metadata.state_dict_metadata

    @property
    def too_late(self) -> str:
        """The beginning of an error message after the first change."""
        return f"loading {self.folder} failed after some weights had changed; create the engine again"


def write(unfinished: Path, snapshot: Snapshot, keep: int | None, what: str, messages: StoreMessages) -> None:
    """Write a checkpoint into the folder of `begin`, and give it its name. All ranks together, perhaps each in a
    thread; `keep` as of `finish`, `what` and errors as of `gather_results`."""
    from . import dcp

    rank = messages.context.rank

    def write_own() -> tuple[list[Any], dict[str, tuple[int, str]]]:
        if not unfinished.is_dir():
            raise CheckpointError(f"this machine cannot see {unfinished}; use a folder that all machines share")
        small = {rank_file(rank): snapshot.own} | ({COMMON: snapshot.common} if rank == 0 else {})
        for name, content in small.items():
            write_file(unfinished / name, content)
        results = dcp.write(snapshot.boxes, snapshot.tensors, unfinished, rank)
        names = [*small, *(path.name for path in unfinished.glob(f"__{rank}_*"))]
        return results, {name: size_and_digest(unfinished / name) for name in names}

    def complete(everyone: list[tuple[list[Any], dict[str, tuple[int, str]]]]) -> None:
        dcp.finish(snapshot.tensors, [results for results, _ in everyone], unfinished)
        files = {name: known for _, theirs in everyone for name, known in theirs.items()}
        files[dcp.METADATA] = size_and_digest(unfinished / dcp.METADATA)
        content = json.loads(json.dumps({"format": FORMAT, "files": files, **snapshot.about}))
        write_file(unfinished / MANIFEST, json.dumps(content | {"sha256": _digest(content)}, indent=1).encode())
        final, size = finish(unfinished, keep), sum(size for size, _ in files.values())
        _log.info("saved step %d to %s: %s", snapshot.about["step"], final, readable(size))

    try:
        everyone = messages.gather_results(what, write_own)
        messages.gather_results(what, lambda: complete(everyone) if rank == 0 else None)
    except HalfmeshError:
        if rank == 0:  # the disk may be full
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def read_intact(folder: Path, what: str, context: ParallelContext) -> dict[str, Any]:
    """The manifest of the checkpoint at `folder`. All ranks together: each reads some of the files, and all raise
    CheckpointError if any is damaged."""
    manifest = run_on_rank_zero(context, what, lambda: read_manifest(folder))
    share = sorted(manifest["files"].items())[context.rank :: context.size]

    def find_damaged() -> list[str]:
        paths = {name: folder / name for name, _ in share}
        return [
            name for name, known in share if not paths[name].is_file() or size_and_digest(paths[name]) != tuple(known)
        ]

    if damaged := sorted(name for theirs in gather_results(context, what, find_damaged) for name in theirs):
        names = shorten(damaged)
        raise CheckpointError(f"{what}: {folder} is damaged: {names} (missing, or changed); take another checkpoint")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of `manifest.json`, which is intact. Raises CheckpointError, or InputError for another format."""
    path = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            problem = f"{folder} has the format {content['format']!r}, but this version of halfmesh reads {FORMAT}"
            raise InputError(f"{problem}; load it with the version that wrote it, or a later one")
        if content.pop("sha256") != _digest(content):
            raise ValueError("its sha256 does not match its content")
    except InputError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); take another checkpoint") from error
    return content


# -- a folder of checkpoints -------------------------------------------------------------------------------------------


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


def final_path(unfinished: Path) -> Path:
    """The path of a checkpoint that `begin` began, when it is complete."""
    return unfinished.with_name(unfinished.name[1:].removesuffix(".tmp"))


def finish(unfinished: Path, keep: int | None) -> Path:
    """Give a complete checkpoint its name, and remove older ones of the same model and engine. Returns its folder.

    Args:
        keep: the number to keep, this one included; None: all, but one for each step.
    """
    sync(unfinished)
    final = final_path(unfinished)
    unfinished.rename(final)
    sync(final.parent)
    step, model = final.name.partition(".")[0], _model(final)
    older = [path for path in checkpoints(final.parent) if path != final and _model(path) == model]
    same_step = [path for path in older if path.name.partition(".")[0] == step]
    rest = [path for path in older if path not in same_step]
    kept = rest if keep is None else rest[: keep - 1]
    for path in [*same_step, *rest[len(kept) :]]:
        _remove(path)
    if kept and kept[0].name > final.name:  # the run went back to an earlier checkpoint
        text = "saved %s, but resume='auto' would load %s, of a later step; if you went back on purpose, remove that"
        _log.warning(text, final, kept[0].name)
    return final


def _model(path: Path) -> tuple[Any, Any] | None:
    """The model of a checkpoint, and its engine's name. None: `path` is not a checkpoint of halfmesh."""
    try:
        manifest = read_manifest(path)
    except (HalfmeshError, OSError):
        return None
    return manifest["model"], engine_name(manifest)


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
        _log.warning("could not remove the old checkpoint %s (%s); remove it yourself", path, error)


def find(directory: Path, context: ParallelContext) -> Stored:
    """The checkpoint in `directory`, or the newest intact one of those in it. All ranks together.

    Raises:
        CheckpointError: there is none, or none that is intact; or its small files hold more than data.
        InputError: a newer version of halfmesh wrote it.
    """
    what = f"loading from {directory} failed"
    candidates = run_on_rank_zero(context, what, lambda: _candidates(directory))
    damaged: list[str] = []
    for folder in candidates:
        try:
            manifest = read_intact(folder, what, context)
        except CheckpointError as error:
            if len(candidates) == 1:
                raise
            damaged.append(str(error).removeprefix(f"{what}: "))
            continue
        if damaged:
            _log.warning("%s", bullet_list(f"loading {folder}, because newer checkpoints are damaged:", damaged))
        return run_on_all_ranks(context, what, partial(_open, folder, manifest, context.rank))
    raise CheckpointError(bullet_list(f"{what}: all checkpoints there are damaged:", damaged))


def _open(folder: Path, manifest: Mapping[str, Any], rank: int) -> Stored:
    """Read the small files of a checkpoint."""
    from . import dcp

    def read(name: str) -> dict[str, Any]:
        with _numpy_is_safe():
            content: dict[str, Any] = torch.load(folder / name, map_location="cpu", weights_only=True)
        return content

    first, own = rank_file(0), rank_file(rank)
    own_content = read(own) if own in manifest["files"] else None
    return Stored(folder, manifest, dcp.read_metadata(folder), read(COMMON), read(first), own_content)


def _candidates(directory: Path) -> list[Path]:
    """`directory`, if it is a checkpoint itself; or those in it."""
    if (directory / MANIFEST).exists():
        return [directory]
    found = checkpoints(directory) if directory.is_dir() else []
    if not found:
        there = "it holds no complete checkpoint" if directory.is_dir() else "there is no such folder"
        raise CheckpointError(f"{there}; give the folder that you gave engine.save, or a checkpoint in it")
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
        problem = f"another job saves into {folder} ({file.read(200)}); end it first, or use another folder"
        raise CheckpointError(f"{problem} (if its machine is gone, remove {folder / LOCK})") from None
    except OSError as error:
        _log.warning("could not lock %s (%s); make sure that no other job saves there", folder, error)
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


# -- files -------------------------------------------------------------------------------------------------------------


def rank_file(rank: int) -> str:
    """The name of the file with this rank's state."""
    return f"rank-{rank:05d}.pt"


def _numpy_is_safe() -> torch.serialization.safe_globals:
    """A scope in which torch also reads numpy's numbers and arrays: their classes run no code."""
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    safe: list[Any] = [np.ndarray, np.dtype, *dtypes]
    for value in (np.float64(0), np.zeros(0)):  # the functions that make them, under their names in numpy 1 and 2
        make: Any = value.__reduce__()[0]
        safe += [(make, f"numpy.{core}.multiarray.{make.__name__}") for core in ("core", "_core")]
    known = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([each for each in safe if each not in known])  # the end removes them


def as_bytes(content: Mapping[str, Any]) -> bytes:
    """The bytes of a file with plain values, tensors, and numpy's numbers and arrays. Raises InputError for others."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    buffer.seek(0)
    with _numpy_is_safe():
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        names = ", ".join(sorted(unsafe))
        raise InputError(f"{names} in the state of {', '.join(content)}: loading it could run code; leave it out")
    return buffer.getvalue()


def write_file(path: Path, content: bytes) -> None:
    """Write a file; it is on disk when this returns."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_and_digest(path: Path) -> tuple[int, str]:
    """Size in bytes and sha256 of a file. Reads it at 1 to 2 GB/s."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
