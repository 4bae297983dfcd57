"""Helpers of a trial: shortens a call, and measures the difference of two outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...utils.tensors import map_tensors, tensors_of
from .shard import ROWS, BatchShard

_HALF = (torch.float16, torch.bfloat16)
ROWS_OF_RANK, TOKENS_OF_RANK = 1, 8
"""In a trial."""
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1
"""Of norms, where all is computed in fp32 and where not. Rounding does far less, but may send some tokens to other
experts in half precision."""


@dataclass
class Seen:
    """The observations of one run of a trial.

    Attributes:
        functions: the functions of torch that were called.
        counts: for each loss, the number of targets that count on all ranks.
        half: something was computed in half precision.
    """

    functions: set[Any] = field(default_factory=set)
    counts: list[int] = field(default_factory=list)
    half: bool = False

    def note(self, function: Any, args: Any) -> None:
        tensors = [value for value in args if isinstance(value, torch.Tensor) and not value.is_meta]
        self.functions.add(function)
        self.half |= any(t.dtype in _HALF or torch.is_autocast_enabled(t.device.type) for t in tensors)


def shorten_call(given: Mapping[str, Any], shard: BatchShard) -> dict[str, Any]:
    """The arguments for a few rows or the first tokens, of [batch, sequence, ...] and of masks [..., sequence]."""
    kept = min(shard.whole, shard.size * (ROWS_OF_RANK if shard.dim == ROWS else TOKENS_OF_RANK))
    return {name: map_tensors(partial(_shorten, shard, kept), value) for name, value in given.items()}


def _shorten(shard: BatchShard, kept: int, tensor: torch.Tensor) -> torch.Tensor:
    is_mask = shard.dim != ROWS and tensor.dim() > 3
    for dim in (tensor.dim() - 2, tensor.dim() - 1) if is_mask else (shard.dim,):
        if tensor.dim() > dim and tensor.shape[dim] == shard.whole:
            tensor = tensor.narrow(dim, 0, kept)
    return tensor


def rounds_products() -> bool:
    """Return True if products of fp32 are rounded, to TF32 or bf16."""
    fp32 = {backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)}
    return not fp32 <= {"none", "ieee"}


def find_gap(whole: Any, sharded: Any) -> float:
    """The largest difference of two outputs, relative to the norm of the unsharded one."""
    gaps = [0.0]
    for one, other in zip(tensors_of(whole), tensors_of(sharded), strict=True):
        if one.shape != other.shape:
            return float("inf")
        if one.is_floating_point():
            a, b = (x.detach().double().nan_to_num(0.0, 0.0, 0.0) for x in (one, other))
            gaps.append(float((a - b).norm() / a.norm().clamp_min(1e-30)))
    return max(gaps)
