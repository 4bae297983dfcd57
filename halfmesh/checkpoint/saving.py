"""engine.save: a checkpoint that is complete or not there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointError, HalfmeshError, InputError
from ..log import get_logger
from ..parallel.context import ParallelContext
from . import folder as folders
from . import planners, progress
from .contents import MODEL, Holding, Pieces, join_groups, refuse_differing, without_empty
from .lock import FolderLocks
from .together import HostRanks, Ranks, together

_log = get_logger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """All that is saved, as this rank has it.

    Attributes:
        pieces: of the model and the optimizer's state.
        common: `common.pt`, the same on all ranks.
        own: `rank-00000.pt`, of this rank alone.
        about: for `manifest.json`.
    """

    pieces: Pieces
    common: bytes
    own: bytes
    about: Mapping[str, Any]


def collect(holding: Holding, context: ParallelContext, common: Mapping[str, Any]) -> tuple[Pieces, dict[str, Any]]:
    """The tensors that this rank holds; and `common`, with what the optimizer's state has besides. All ranks together.

    Raises:
        InputError: state that cannot be saved, on some rank; raised on all of them.
    """

    def collected() -> tuple[Pieces, dict[str, Any], Any]:
        holding.update.sync_param_groups()  # groups added since the last step
        pieces, plain = holding.optimizer_state()
        pieces |= {MODEL + name: piece for name, piece in holding.weights().items()} | holding.averages()
        return pieces, plain, (holding.groups(), holding.extras())

    pieces, plain, (groups, extras) = together(context, "engine.save", collected)
    shapes = {name: tuple(piece.placement.shape) for name, piece in pieces.items() if name.startswith(MODEL)}
    averages = holding.average is not None and holding.average.decay is not None
    everyone = context.everyone(([group["params"] for group in groups], plain, extras, shapes, averages))
    _refuse_single_averages([theirs for *_, theirs in everyone])
    refuse_differing(holding.update.optimizer, [theirs for _, theirs, *_ in everyone])
    joined = join_groups([names for names, *_ in everyone])
    model = sorted({named for *_, theirs, _ in everyone for named in theirs.items()})
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return without_empty(pieces), {
        **common,
        "optimizer": class_name(holding.update.optimizer),
        "groups": [group | {"params": names} for group, names in zip(settings, joined, strict=True)],
        "plain_state": _merged(theirs for _, theirs, *_ in everyone),
        "extras": _merged(theirs for _, _, theirs, *_ in everyone),
        "model": hashlib.sha256(json.dumps(model).encode()).hexdigest(),
    }


def begin(directory: Path, step: int, context: ParallelContext, locks: FolderLocks) -> Path:
    """Make the folder that a checkpoint is written into. All ranks together.

    Raises:
        CheckpointError: it could not be made, is not there on some rank, or another job saves to `directory`; raised on
            all of them.
    """
    what = _failed(directory, step)

    def begun() -> Path | None:
        if context.rank != 0:
            return None
        locks.take(directory)
        return folders.begin(directory, step)

    place: Path = context.from_first(together(context, what, begun))
    with _removed_after_an_error(place, context):
        together(context, what, lambda: _refuse_unseen(place))
    return place


def write(place: Path, snapshot: Snapshot, ranks: Ranks, keep: int | None) -> Path:
    """Write a checkpoint into `place`, which `begin` made. All ranks together; returns where it is then.

    Raises:
        CheckpointError: it could not be written, on some rank; raised on all of them. What was there before is intact.
    """
    step = snapshot.about["step"]
    with _removed_after_an_error(place, ranks):
        final, size = _fill(place, _failed(place.parent, step), snapshot, ranks, keep)
    if ranks.rank == 0:
        _log.info("saved step %d to %s: %.1f MB", step, final, size / 2**20)
    return final


@contextmanager
def _removed_after_an_error(place: Path, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except HalfmeshError:
        if ranks.rank == 0:  # the disk may be full
            shutil.rmtree(place, ignore_errors=True)
        raise


def _failed(directory: Path, step: int) -> str:
    return f"saving step {step} to {directory} failed, and what was saved before is as it was"


def _fill(place: Path, what: str, snapshot: Snapshot, ranks: Ranks, keep: int | None) -> tuple[Path, int]:
    """Write all files into `place`, and give it its name. Returns that, and the bytes of all of them."""
    together(ranks, what, lambda: _write_rest(place, snapshot, ranks))
    tensors = together(ranks, what, lambda: _write_tensors(place, snapshot, ranks))  # with collectives of its own
    mine = together(ranks, what, lambda: folders.describe(place, _written(place, ranks.rank)))
    files = {name: known for theirs in ranks.everyone(mine) for name, known in theirs.items()}

    def complete() -> Path | None:
        if ranks.rank != 0:
            return None
        folders.Manifest(files, {**snapshot.about, "tensors": tensors}).write(place)
        return folders.finish(place, keep)

    final: Path = ranks.from_first(together(ranks, what, complete))
    return final, sum(size for size, _ in files.values())


def _write_rest(place: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    if ranks.rank == 0:
        progress.write(place / progress.COMMON, snapshot.common)
    progress.write(place / progress.rank_file(ranks.rank), snapshot.own)


def _write_tensors(place: Path, snapshot: Snapshot, ranks: Ranks) -> int:
    """Returns how many tensors there are in the checkpoint."""
    group = ranks.group if isinstance(ranks, HostRanks) else None
    try:
        return planners.write(snapshot.pieces, place, ranks.size == 1, group)
    except CheckpointException as error:  # on all ranks, with the reasons of those that failed
        mine = error.failures.get(ranks.rank)
        if mine is not None:
            raise mine[0] from error
        return 0  # the others raise


def _written(place: Path, rank: int) -> list[str]:
    """The files that this rank has written."""
    names = [path.name for path in place.glob(f"__{rank}_*")] + [progress.rank_file(rank)]
    return names + ([".metadata", progress.COMMON] if rank == 0 else [])


def _refuse_unseen(place: Path) -> None:
    if not place.is_dir():
        raise CheckpointError(
            f"{place}, which rank 0 has made, is not there on this machine; give a folder that all machines share"
        )


def _refuse_single_averages(averages: Sequence[bool]) -> None:
    """Raise InputError, on all ranks, if some average the weights and some do not: each has only a part of that."""
    if len(set(averages)) > 1:
        ranks = [rank for rank, has in enumerate(averages) if has]
        raise InputError(
            f"engine.averaged_model was called on rank(s) {ranks} only; call it on every rank, also to save the average"
        )


def refuse_arguments(directory: Path, keep: int | None, in_background: bool, context: ParallelContext) -> None:
    """Raise InputError if they are wrong, or not the same on all ranks."""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise InputError(f"engine.save: keep={keep!r} is not a number of checkpoints; give 1 or more, or None for all")
    if not context.agree(json.dumps([str(directory), keep, in_background])):
        raise InputError("engine.save was called with different arguments on each rank; give the same on all of them")


def _merged(parts: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= {key: value for key, value in part.items() if key not in merged}
    return merged


def class_name(value: object) -> str:
    """The class of `value`, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def versions() -> dict[str, str]:
    """Of what wrote a checkpoint."""
    from .. import __version__

    return {"halfmesh": __version__, "torch": torch.__version__}
