"""A thread that writes a checkpoint while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import torch

from ..utils.log import get_logger
from .state import Boxes

_log = get_logger(__name__)


def wait_for_writers(directory: Path) -> None:
    """Wait for saves of all engines of this process into `directory`: the next one removes unfinished saves there."""
    for thread in threading.enumerate():
        if thread.name.startswith(_thread_name(directory)):
            thread.join()


def _thread_name(directory: Path) -> str:
    return f"halfmesh save {directory.resolve()}:"


class BackgroundWriter:
    """Writes one checkpoint at a time, from a copy in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: futures.Future[None] | None = None
        self._copies: Boxes = {}

    @torch.no_grad()
    def copy(self, boxes: Boxes) -> Boxes:
        """Copies of `boxes` in host memory, page-locked for a GPU. The memory is kept for the next call, because new
        memory costs more to fill."""
        kept, self._copies = self._copies, {}
        for key, box in boxes.items():
            copy = kept.pop(key, None)
            if copy is None or (copy.shape, copy.dtype) != (box.shape, box.dtype):
                copy = torch.empty(box.shape, dtype=box.dtype, pin_memory=self._device.type == "cuda")
            self._copies[key] = copy.copy_(box, non_blocking=box.is_cuda)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._copies

    def start(self, write: Callable[[], object], directory: Path) -> None:
        """Call `write`, which writes into `directory`, in a thread that the process joins at exit. The previous one
        must have ended."""
        thread = futures.ThreadPoolExecutor(1, _thread_name(directory))
        self._written = thread.submit(self._run, write)
        thread.shutdown(wait=False)  # it ends after this save

    def wait(self) -> None:
        """Wait for the thread, and raise its error if it failed."""
        if self._written is not None:
            futures.wait([self._written])  # Ctrl-C ends this line: the next call then waits again
            written, self._written = self._written, None
            written.result()

    def _run(self, write: Callable[[], object]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has a current device
        try:
            write()
        except Exception as error:  # the same on all ranks, unless they can no longer be reached
            _log.warning("%s", error)  # logged now: the next call that waits may come much later
            raise
