"""The shard of a batch that a rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import collectives

ROWS, TOKENS = 0, 1
"""Dims of a model's arguments: [batch, ...], or [batch, sequence, ...]."""


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
