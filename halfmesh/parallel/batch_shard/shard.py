"""The shard of a batch that a rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...utils.tensors import map_tensors
from .. import collectives

ROWS, TOKENS = 0, 1
"""Dims of a model's arguments: [batch, ...], or [batch, sequence, ...]."""
_HALF = (torch.float16, torch.bfloat16)
ROWS_OF_RANK, TOKENS_OF_RANK = 1, 8
"""In a trial."""


@dataclass(frozen=True)
class BatchShard:
    """A batch of which each rank of a group has an equal number of consecutive rows, or tokens of each sequence, in
    order of rank.

    Attributes:
        key: of the axis in the config.
        dim: ROWS or TOKENS.
        rows: of the full batch.
        whole: rows of the full batch, or tokens of a full sequence: those that are sharded.
        splits_rows: a pipeline splits the batch into microbatches.
    """

    key: str
    group: dist.ProcessGroup
    dim: int
    rows: int
    whole: int
    splits_rows: bool = False

    @property
    def size(self) -> int:
        """The number of ranks over which the batch is sharded."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self.group.rank()

    @property
    def own(self) -> int:
        """This rank's rows, or tokens of each sequence."""
        return self.whole // self.size

    def cut(self, whole: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """This rank's shard, a view. `dim`: that of the rows or tokens, if it is not `self.dim`."""
        return whole.narrow(self.dim if dim is None else dim, self.rank * self.own, self.own)

    def cut_if_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor that has all rows or tokens, contiguous (for `view(-1)`); else `tensor`."""
        is_whole = tensor.dim() > self.dim and tensor.shape[self.dim] == self.whole
        return self.cut(tensor).contiguous() if is_whole else tensor

    def join_if_own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shards of all ranks, joined, of a tensor that is this rank's shard; else `tensor`."""
        is_own = tensor.dim() > self.dim and tensor.shape[self.dim] == self.own
        return collectives.gather(tensor, self.dim, self.group) if is_own else tensor

    def cut_targets(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the targets of all rows and tokens, which may be flat."""
        if whole.dim() > 1:
            return self.cut(whole)
        return self.cut(whole.reshape(-1, self.whole) if self.dim else whole.reshape(self.whole, -1)).reshape(-1)

    def are_outputs(self, count: int) -> bool:
        """Return True if `count` may be the number of this rank's outputs for the batch, or for a microbatch."""
        if self.dim == ROWS:
            return count % self.own == 0
        total = self.rows * self.own
        return count == total or (self.splits_rows and 0 < count < total and total % count == 0)


# -- the trial before the first update -----------------------------------------------------------------------------


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
