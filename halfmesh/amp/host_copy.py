"""Numbers on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is made of what runs now: then the host can read nothing, and does nothing in a replay."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # it need not be the current one
        return torch.cuda.is_current_stream_capturing()


class HostCopy:
    """Copies of 0-dim tensors in host memory. On a GPU they are started now and do not hold anything up.

    Elsewhere, and while a CUDA graph is captured, the tensors themselves are kept: they must not be written any more
    (of a graph they are the memory that each replay writes).
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._ready: torch.cuda.Event | None = None
        self._values = values
        if values and values[0].is_cuda and not is_captured(values[0].device):
            joined = torch.stack([value.double() for value in values])
            copied = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            copied.copy_(joined, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(values[0].device))
            self._values = copied.unbind()

    @property
    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._ready is None or self._ready.query()

    def read(self) -> list[float]:
        """The values; waits for them."""
        if self._ready is not None:
            self._ready.synchronize()
        return [float(value) for value in self._values]
