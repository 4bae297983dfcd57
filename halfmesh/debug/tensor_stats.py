"""Statistics of a tensor's elements: how many are inf, nan or zero, and how large the others are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

_CHUNK = 2**24
"""Elements that are measured at a time: a copy of a whole activation may not fit into memory."""


@dataclass(frozen=True)
class TensorStats:
    """Counts of elements; `largest` is the largest finite magnitude."""

    count: int = 0
    inf: int = 0
    nan: int = 0
    zeros: int = 0
    subnormal: int = 0
    """Not zero, but below the smallest number that the dtype has in full precision."""
    largest: float = 0.0

    def __add__(self, other: TensorStats) -> TensorStats:
        return TensorStats(
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
    """Of what this rank holds of `tensor` (reads the host); empty if it is not floating-point."""
    found = TensorStats()
    values = _values(tensor)
    for chunk in () if values is None else values.split(_CHUNK):
        size = chunk.abs()
        finite = size < math.inf  # nan is not
        tiny = torch.finfo(chunk.dtype).tiny
        counts = [size == math.inf, size.isnan(), size == 0, (size > 0) & (size < tiny)]
        largest = torch.where(finite, size, torch.zeros_like(size)).max()
        inf, nan, zeros, subnormal, most = torch.stack([*(c.sum().double() for c in counts), largest.double()]).tolist()
        found += TensorStats(chunk.numel(), int(inf), int(nan), int(zeros), int(subnormal), most)
    return found


@torch.no_grad()
def is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is no inf and no nan in what this rank holds of it (reads the host)."""
    values = _values(tensor)
    return values is None or bool(values.isfinite().all())


def largest_number(dtype: torch.dtype) -> float:
    """The largest finite number of a floating-point dtype; inf of others."""
    return torch.finfo(dtype).max if dtype.is_floating_point else math.inf


def name_of(dtype: torch.dtype | None) -> str:
    """ "float16"; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _values(tensor: Any) -> torch.Tensor | None:
    """The elements as real numbers in one row; None if there are none."""
    if hasattr(tensor, "to_local"):  # a DTensor
        tensor = tensor.to_local()
    if tensor.is_meta or tensor.is_nested or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    values: torch.Tensor = (tensor.float() if tensor.element_size() == 1 else tensor).reshape(-1)
    return values
