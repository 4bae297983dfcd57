"""engine.save beside training: a copy of the state on the host, and a thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ..log import get_logger
from ..parallel.context import ParallelContext
from .contents import Piece, Pieces
from .last_step import LastStep
from .together import HostRanks

_log = get_logger(__name__)


class HostBuffers:
    """Memory of the host that pieces are copied into. Kept from save to save, because new memory costs more to fill."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, pieces: Pieces) -> Pieces:
        """The pieces, with copies of what is held; in the same memory as those of the call before. On a GPU it is
        page-locked, so that the copies go at the speed of the bus."""
        buffers = {name: self._fitting(name, piece.held) for name, piece in pieces.items()}
        for name, piece in pieces.items():
            buffers[name].copy_(piece.held, non_blocking=piece.held.is_cuda)
        for device in {piece.held.device for piece in pieces.values() if piece.held.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = buffers
        return {name: Piece(buffers[name], piece.placement) for name, piece in pieces.items()}

    def _fitting(self, name: str, held: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (held.shape, held.dtype):
            return torch.empty_like(held, device="cpu", pin_memory=held.is_cuda)
        return buffer


class Background:
    """Saves that go on beside training, one at a time. An error of one is raised by the same call on all ranks.

    Ranks are not at the same step when a save fails. So they agree on the last step that any of them has begun, and
    each raises when it would begin the one after it. While they agree, which takes one message, none begins a step.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.buffers = HostBuffers()
        self._device = context.device
        self._ranks = HostRanks.of(context)
        self._thread: threading.Thread | None = None
        self._steps = LastStep()
        self._error: Exception | None = None

    def start(self, write: Callable[[HostRanks], object]) -> None:
        """Call `write` in a thread; the one before has to be done. The process does not end before it."""
        self._thread = threading.Thread(target=self._run, args=(write,), name="halfmesh save")
        self._thread.start()

    def before_step(self) -> None:
        """Count a step; or raise why a save has failed."""
        while not self._steps.advance():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being saved; raise why it failed, if it did."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        self._steps.release(None)
        if error is not None:
            raise error

    def _run(self, write: Callable[[HostRanks], object]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own
        try:
            write(self._ranks)
        except Exception as error:  # the same on all ranks, or they can no longer be reached
            if self._ranks.rank == 0:
                _log.warning("%s", error)  # there may be no step that raises it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        last = self._steps.hold()
        try:
            last = max(self._ranks.everyone(last))
        except Exception as lost:
            _log.warning("the other ranks were not told that a save has failed: %s", lost)
        self._error = error
        self._steps.release(last)
