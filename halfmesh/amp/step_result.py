"""The host's view of an update, read without holding up the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import optim


class StepResult:
    """The result of one update. Attributes are read from the device at first use, without communication.

    On a GPU a copy of the numbers to host memory is started with the update and does not hold it up.
    """

    def __init__(self, optimizer: optim.Optimizer, **numbers: torch.Tensor | None) -> None:
        """`numbers`: 0-dim tensors that are not written any more, those that are known of `skipped`, `norm` (of the
        gradients before division), `divisor` (of these), `scale`, `num_zeros`."""
        lr = optimizer.param_groups[0].get("lr", math.nan)  # a third party's optimizer may have none
        self._lr: float | torch.Tensor = lr.clone() if isinstance(lr, torch.Tensor) else lr
        known = {name: number for name, number in numbers.items() if number is not None}
        self._names = list(known)
        self._copy = HostCopy(list(known.values()))
        self._values: dict[str, float] | None = None

    def _get(self, name: str) -> float | None:
        if self._values is None and name in self._names:
            self._values = dict(zip(self._names, self._copy.read(), strict=True))
        return (self._values or {}).get(name)

    @property
    def skipped(self) -> bool:
        """True if the update was skipped because a gradient on some rank was inf or nan."""
        return bool(self._get("skipped"))

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradients over all ranks, unscaled and before clipping; None if it was not measured."""
        norm = self._get("norm")
        divisor = None if norm is None else self._get("divisor")
        return norm if norm is None or divisor is None else norm / divisor

    @property
    def loss_scale(self) -> float:
        """The loss scale of this step's backward (of loss_id 0); 1.0 without loss scaling."""
        scale = self._get("scale")
        return 1.0 if scale is None else scale

    @property
    def num_zeros(self) -> int | None:
        """Number of gradient elements that are exactly zero, over all ranks; None if not counted."""
        zeros = self._get("num_zeros")
        return None if zeros is None else round(zeros)

    @property
    def lr(self) -> float:
        """The learning rate used, of the first parameter group."""
        return float(self._lr)

    def __repr__(self) -> str:
        return (
            f"StepResult(skipped={self.skipped}, grad_norm={self.grad_norm}, loss_scale={self.loss_scale:g}, "
            f"lr={self.lr:g}, num_zeros={self.num_zeros})"
        )


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
            self._values = list(copied.unbind())

    @property
    def arrived(self) -> bool:
        """True if `read` would not wait. (Ranks may differ in this: no collective may depend on it.)"""
        return self._ready is None or self._ready.query()

    def read(self) -> list[float]:
        """The values; waits for them."""
        if self._ready is not None and not self._ready.query():
            self._ready.synchronize()
        return torch.stack([value.double() for value in self._values]).tolist() if self._values else []


def is_captured(device: torch.device) -> bool:
    """Return True in the capture of a CUDA graph: the host cannot read then, and host code does not run in a replay."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # it need not be the current one
        return torch.cuda.is_current_stream_capturing()
