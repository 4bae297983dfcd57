"""How checkpoints lie in a folder: complete under their name, or not at all.

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
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, shorten
from ..log import get_logger
from . import progress

_log = get_logger(__name__)

FORMAT = 1
"""Raised by what an older reader cannot read."""
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d{8,}(?:\.\d+)?\.tmp")
_PLAIN = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Manifest:
    """What stands in `manifest.json`.

    Attributes:
        files: size in bytes and sha256 of every other file, by name.
        about: what is told of the run: step, layout, device, model (a digest of names and shapes), config, versions,
            number of tensors.
        format: of the checkpoint; where it is another than `FORMAT`, the rest is empty.
    """

    files: Mapping[str, tuple[int, str]]
    about: Mapping[str, Any]
    format: Any = FORMAT

    def write(self, folder: Path) -> None:
        """Make it the manifest of `folder`, on disk when this returns."""
        content = json.loads(json.dumps({"format": FORMAT, "files": self.files, **self.about}))
        content["sha256"] = digest_of(content)
        with open(folder / MANIFEST, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of `folder`.

        Raises:
            CheckpointError: there is none, it is damaged, or names a file outside of its folder.
        """
        path = folder / MANIFEST
        try:
            if not stat.S_ISREG(path.lstat().st_mode):  # to open a pipe or a device may block
                raise ValueError("it is a link, a pipe or a device, not a file")
            content = json.loads(path.read_bytes())
            saved_as = content.pop("format")
            if saved_as != FORMAT:
                return Manifest({}, {}, saved_as)
            if content.pop("sha256") != digest_of({"format": FORMAT, **content}):
                raise ValueError("its content has another sha256 than when it was written")
            files = {name: (int(size), str(digest)) for name, (size, digest) in content.pop("files").items()}
            _refuse_incomplete(files, content)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
        except KeyError as error:
            raise CheckpointError(f"{path} is damaged (it has no {error}); take another checkpoint") from error
        except (ValueError, OverflowError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); take another checkpoint") from error
        for name in files:
            if not _PLAIN.fullmatch(name) or name in (".", "..") or (folder / name).is_symlink():
                raise CheckpointError(
                    f"{path} names {name!r}, which is not a file of the folder itself; it was changed, or does not "
                    "belong here: take another checkpoint"
                )
        return Manifest(files, content)


def digest_of(content: Mapping[str, Any]) -> str:
    """sha256 of what stands in a manifest, besides itself."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _refuse_incomplete(files: Mapping[str, object], about: Mapping[str, Any]) -> None:
    """Raise if something that `load` needs is not in a manifest: nothing may have changed when that is found."""
    sizes = [about["layout"][axis] for axis in ("pipeline", "data", "tensor")]
    if not all(type(size) is int and size > 0 for size in sizes) or type(about["device"]) is not str:
        raise ValueError(f"its layout is {about['layout']}, and its device {about['device']!r}")
    ranks = min(math.prod(sizes), len(files) + 1)  # one more than there can be files is enough to find one missing
    needed = [".metadata", progress.COMMON, *map(progress.rank_file, range(ranks))]
    missing = [name for name in needed if name not in files]
    if missing:
        raise ValueError(f"its files are without {shorten(missing)}")


def describe(folder: Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Size and sha256 of files in `folder`. Reads all of them: 1 to 2 GB/s where the processor knows sha256."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = os.fstat(file.fileno()).st_size, digest
    return found


def find_damage(folder: Path, manifest: Manifest, share: slice) -> list[str]:
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


def finish(unfinished: Path, keep: int | None) -> Path:
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
    return final


def _model(path: Path) -> tuple[Any, str | None] | None:
    """The model that the checkpoint at `path` is of, and its engine's name; None: it is none of ours."""
    try:
        if path.is_symlink():
            return None
        about = Manifest.read(path).about
        return about.get("model"), engine_name(about)
    except (CheckpointError, OSError):
        return None


def engine_name(about: Mapping[str, Any]) -> str | None:
    """What the config key `name` was, by a manifest's `about`."""
    config = about.get("config")
    return config.get("name") if isinstance(config, dict) else None


def _remove(path: Path) -> None:
    """Remove what is no longer needed. A save that is complete does not fail because that cannot be done."""
    try:
        if not _UNFINISHED.fullmatch(path.name):  # first, so that no half of one has the name of a whole one
            path = path.rename(path.with_name(f".{path.name}.tmp"))
        shutil.rmtree(path)
    except OSError as error:
        _log.warning(
            "%s is no longer needed and cannot be removed (%s: %s); remove it yourself",
            path,
            type(error).__name__,
            error,
        )


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
