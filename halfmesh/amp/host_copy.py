"""Numbers on their way from the device to the host."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of a small tensor in host memory. On a GPU it is started now and does not hold anything up."""

    def __init__(self, values: torch.Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    @property
    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._ready is None or self._ready.query()

    def read(self) -> list[float]:
        """The values of a 1-D tensor; waits for them."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._values.tolist()
