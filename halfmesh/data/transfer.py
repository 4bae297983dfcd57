"""Batches on their way to the device, while it still works on the one before."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from ..tensors import map_tensors


def workers(loader: Any) -> int:
    """How many processes of its own fetch the batches of `loader`."""
    return getattr(getattr(loader, "loader", loader), "num_workers", 0)  # one that is read in strides has one inside


def reuses_memory(loader: Any) -> bool:
    """Whether a batch of `loader` may be written over when the next one is fetched.

    Not where workers send it, nor where torch joins samples, which makes new tensors. A dataset that gives whole
    batches, or a `collate_fn`, may have one buffer for all.
    """
    return isinstance(loader, DataLoader) and not workers(loader) and loader.collate_fn is not default_collate


def copied(batch: Any) -> Any:
    """The batch, its tensors in memory of its own."""
    return map_tensors(torch.clone, batch)


class Transfer:
    """Copies batches to `device`. To a GPU it does so from pinned memory, on a stream of its own, and holds nothing up.

    Where batches are fetched ahead, it takes the memory of one batch more on a GPU. Nothing is copied where a batch is
    there already (`keep` does).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._reads = False  # memory that is not this object's, until it has been copied

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

    def keep(self, batch: Any) -> Any:
        """The batch, with copies of the tensors that `start` would leave where they are."""
        return map_tensors(lambda tensor: tensor.clone() if tensor.device.type == self.device.type else tensor, batch)

    def wait(self) -> None:
        """Until memory that was page-locked when it came has been copied: it may be written over then."""
        if self._stream is not None and self._reads:
            self._stream.synchronize()
            self._reads = False

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if tensor.is_pinned():
            self._reads = True
            pinned = tensor
        else:
            pinned = tensor.pin_memory()  # copies from other memory hold the host up
        return pinned.to(self.device, non_blocking=True)
