"""Batches on their way to the device, while it still works on the one before."""

from __future__ import annotations

from typing import Any

import torch

from ..tree import map_tensors


class Transfer:
    """Copies batches to `device`. To a GPU it does so from pinned memory, on a stream of its own, and holds nothing up.

    The memory of one batch more than without it is taken on a GPU; nothing is copied where a batch is there already.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def start(self, batch: Any) -> Any:
        """The batch, on its way: for `finish` only."""
        if self.device.type != "cuda":
            return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            return map_tensors(self._copy, batch)

    def finish(self, batch: Any) -> Any:
        """The batch, to be used on the stream that is current here."""
        if self._stream is None:
            return batch
        stream = torch.cuda.current_stream(self.device)
        stream.wait_stream(self._stream)

        def use(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.to(self.device)
            tensor.record_stream(stream)  # else its memory could be given away while this stream reads it
            return tensor

        return map_tensors(use, batch)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()  # copies from other memory hold the host up
        return pinned.to(self.device, non_blocking=True)
