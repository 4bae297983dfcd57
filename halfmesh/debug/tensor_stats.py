"""Statistics of a tensor's elements: how many are inf, nan, zero or too small, and how large the others are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_CHUNK = 2**24
"""Elements that are measured at a time: a copy of a whole activation may not fit into memory."""


@dataclass(frozen=True)
class TensorStats:
    """Counts of elements; `subnormal`: not zero, but below the smallest number that the dtype has in full precision;
    `largest`: the largest finite magnitude."""

    dtype: torch.dtype | None = None
    count: int = 0
    inf: int = 0
    nan: int = 0
    zeros: int = 0
    subnormal: int = 0
    largest: float = 0.0

    def __add__(self, other: TensorStats) -> TensorStats:
        return TensorStats(
            self.dtype or other.dtype,
            self.count + other.count,
            self.inf + other.inf,
            self.nan + other.nan,
            self.zeros + other.zeros,
            self.subnormal + other.subnormal,
            max(self.largest, other.largest),
        )

    @property
    def nonfinite(self) -> int:
        """How many are inf or nan."""
        return self.inf + self.nan


@torch.no_grad()
def measure(tensor: torch.Tensor) -> TensorStats:
    """Of what this rank holds of `tensor` (reads the device); no counts if it is not floating-point."""
    found = TensorStats(tensor.dtype)
    values = _values(tensor)
    for chunk in () if values is None else values.split(_CHUNK):
        size = chunk.abs()
        is_finite, is_tiny = size < math.inf, (size > 0) & (size < torch.finfo(chunk.dtype).tiny)
        counts = [count.sum().double() for count in (size == math.inf, size.isnan(), size == 0, is_tiny)]
        largest = torch.where(is_finite, size, torch.zeros_like(size)).max().double()
        inf, nan, zeros, subnormal, most = torch.stack([*counts, largest]).tolist()
        found += TensorStats(tensor.dtype, chunk.numel(), int(inf), int(nan), int(zeros), int(subnormal), most)
    return found


@torch.no_grad()
def is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is no inf and no nan in what this rank holds of it (reads the device)."""
    values = _values(tensor)
    return values is None or bool(values.isfinite().all())


def largest_number(dtype: torch.dtype | None) -> float:
    """The largest finite number of a floating-point dtype; inf of others."""
    return torch.finfo(dtype).max if dtype is not None and dtype.is_floating_point else math.inf


def name_of(dtype: torch.dtype | None) -> str:
    """ "float16"; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements in one row; None if there are none in floating point."""
    tensor = getattr(tensor, "to_local", lambda: tensor)()  # a DTensor
    is_plain = tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.reshape(-1) if is_plain and tensor.numel() else None
