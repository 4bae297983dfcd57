"""A save on its way to the files of a checkpoint, at once or in a thread beside training; and back."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError, HalfmeshError
from ..log import get_logger
from ..parallel.context import ParallelContext
from . import storage
from .collective import all_gather_object, run_on_all_ranks, run_on_rank_zero
from .state import Boxes, WholeTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

# .dcp imports torch.distributed.checkpoint and more: only when there is something to save.

_log = get_logger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """All that is saved.

    Attributes:
        tensors: of the model and the optimizer's state, whole.
        boxes: of these, what this rank writes.
        common: `common.pt`, the same on all ranks.
        own: `rank-00000.pt`, of this rank alone.
        about: for `manifest.json`.
    """

    tensors: dict[str, WholeTensor]
    boxes: Boxes
    common: bytes
    own: bytes
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose files are as they were written, with the content of the small ones.

    Attributes:
        first, own: what rank 0 had for itself, and the rank with this one's number, if there was one.
    """

    folder: Path
    manifest: storage.Manifest
    metadata: Metadata
    common: Mapping[str, Any]
    first: Mapping[str, Any]
    own: Mapping[str, Any] | None

    @property
    def tensors(self) -> dict[str, Any]:
        """DCP's description of each, by its full name."""
        return self.metadata.state_dict_metadata

    @property
    def too_late(self) -> str:
        """What has failed, for an error after the first change."""
        return f"loading {self.folder} failed when weights were changed already; make the engine anew"


class BackgroundWriter:
    """A thread that writes one checkpoint at a time, and the copy in host memory that it writes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, boxes: Boxes) -> Boxes:
        """Copies of `boxes`, in one buffer that is kept for the next call, because new memory costs more to fill. On a
        GPU it is page-locked, so that the copies go at the speed of the bus."""
        ends = [0]
        for box in boxes.values():
            ends.append(ends[-1] + -(-box.nbytes // 64) * 64)  # where any dtype may begin
        if self._buffer.numel() < ends[-1]:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # first, or there would be two
            self._buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        copies = {}
        for (key, box), start in zip(boxes.items(), ends, strict=False):
            copies[key] = self._buffer[start : start + box.nbytes].view(box.dtype).view(box.shape)
            copies[key].copy_(box, non_blocking=box.is_cuda)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def start(self, write: Callable[[], object]) -> None:
        """Call `write` in a thread; the one before has to be done. The process does not end before it."""
        self._thread = threading.Thread(target=self._run, args=(write,), name="halfmesh save")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written; raise why it failed, if it did."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], object]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own
        try:
            write()
        except Exception as error:  # the same on all ranks, or they can no longer be reached
            self._error = error
            _log.warning("%s", error)  # now: it may take a while until somebody waits


def failed(directory: Path, step: int) -> str:
    """How the message of a save that fails begins."""
    return f"saving step {step} to {directory} failed, and what was saved before is as it was"


def write_snapshot(
    place: Path,
    snapshot: Snapshot,
    keep: int | None,
    context: ParallelContext,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint into `place`, and give it its name. All ranks together.

    Args:
        group: of all ranks, for a thread beside training; None: torch's default one.

    Raises:
        CheckpointError: it could not be written, on some rank; raised on all of them. What was there before is intact.
    """
    from . import dcp

    rank, step = context.rank, snapshot.about["step"]
    what = failed(place.parent, step)

    def write() -> tuple[list[Any], dict[str, tuple[int, str]]]:
        names = [storage.rank_file(rank)]
        storage.write_file(place / names[0], snapshot.own)
        if rank == 0:
            names.append(storage.COMMON)
            storage.write_file(place / storage.COMMON, snapshot.common)
        results = dcp.write(snapshot.boxes, snapshot.tensors, place, rank)
        names += [path.name for path in place.glob(f"__{rank}_*")]
        return results, storage.describe(place, names)

    def complete() -> None:
        dcp.finish(snapshot.tensors, [results for results, _ in everyone], place)
        files = {name: known for _, theirs in everyone for name, known in theirs.items()}
        files |= storage.describe(place, [".metadata"])
        storage.Manifest(files, snapshot.about).write(place)
        storage.finish(place, keep)
        size = sum(size for size, _ in files.values())
        _log.info("saved step %d to %s: %.1f MB", step, storage.final_place(place), size / 2**20)

    try:
        mine = run_on_all_ranks(context, what, write, group)
        everyone = all_gather_object(context, mine, group)
        run_on_rank_zero(context, what, complete, group)
    except HalfmeshError:
        if rank == 0:  # the disk may be full
            shutil.rmtree(place, ignore_errors=True)
        raise


def open_stored(folder: Path, manifest: storage.Manifest, context: ParallelContext) -> Stored:
    """Read what stands in the small files. All ranks together.

    Raises:
        CheckpointError: they hold something that does not belong there.
    """
    from . import dcp

    def read(name: str) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(folder / name, map_location="cpu", weights_only=True)
        return content

    def opened() -> Stored:
        first, own = storage.rank_file(0), storage.rank_file(context.rank)
        try:
            metadata = dcp.read_metadata(folder, manifest.files)
            own_content = read(own) if own in manifest.files else None
            return Stored(folder, manifest, metadata, read(storage.COMMON), read(first), own_content)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{folder} holds more than plain data, which is not read because it could run code "
                f"({str(error).partition(chr(10))[0]}); take another checkpoint"
            ) from error

    return run_on_all_ranks(context, f"loading {folder} failed", opened)
