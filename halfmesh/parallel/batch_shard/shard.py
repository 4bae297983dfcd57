"""The shard of a batch that a rank has, and losses of the full batch, which each rank computes from its outputs.

Gradients of the losses are multiplied by the number of ranks, since the reduction afterwards takes the mean over the
ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InputError
from .. import collectives

ROWS, TOKENS = 0, 1
"""Dims of a model's arguments: [batch, ...], or [batch, sequence, ...]."""
TRIAL = {ROWS: 1, TOKENS: 8}
"""The number of rows, or tokens, of each rank in a trial."""

_Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class BatchShard:
    """A batch of which each rank of a group has an equal number of consecutive rows, or tokens of each sequence, in
    order of rank.

    Attributes:
        key: of the axis in the config.
        dim: ROWS or TOKENS.
        rows: of the full batch.
        full_size: rows of the full batch, or tokens of a full sequence: those that are sharded.
        splits_rows: a pipeline splits the batch into microbatches.
    """

    key: str
    group: dist.ProcessGroup
    dim: int
    rows: int
    full_size: int
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
        return self.full_size // self.size

    def cut(self, whole: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """This rank's shard, a view. `dim`: that of the rows or tokens, if it is not `self.dim`."""
        return whole.narrow(self.dim if dim is None else dim, self.rank * self.own, self.own)

    def cut_if_full(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor that has all rows or tokens, contiguous (for `view(-1)`); else `tensor`."""
        is_whole = tensor.dim() > self.dim and tensor.shape[self.dim] == self.full_size
        return self.cut(tensor).contiguous() if is_whole else tensor

    def join_if_own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shards of all ranks, joined, of a tensor that is this rank's shard; else `tensor`."""
        is_own = tensor.dim() > self.dim and tensor.shape[self.dim] == self.own
        return collectives.gather(tensor, self.dim, self.group) if is_own else tensor

    def cut_targets(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the targets of all rows and tokens, which may be flat."""
        if whole.dim() > 1:
            return self.cut(whole)
        shape = (-1, self.full_size) if self.dim else (self.full_size, -1)
        return self.cut(whole.reshape(shape)).reshape(-1)

    def are_outputs(self, count: int) -> bool:
        """Return True if `count` may be the number of this rank's outputs for the batch, or for a microbatch."""
        if self.dim == ROWS:
            return count % self.own == 0
        total = self.rows * self.own
        return count == total or (self.splits_rows and 0 < count < total and total % count == 0)

    def for_trial(self) -> BatchShard:
        """The shard of a batch with few rows, or tokens of each sequence."""
        kept = min(self.full_size, self.size * TRIAL[self.dim])
        return replace(self, full_size=kept, rows=kept if self.dim == ROWS else self.rows)

    def shorten(self, tensor: torch.Tensor, kept: int, is_mask: bool) -> torch.Tensor:
        """The first rows or tokens of a tensor that has all: [batch, sequence, ...], or a mask [..., sequence]."""
        for dim in (max(0, tensor.dim() - 2), tensor.dim() - 1) if is_mask else (self.dim,):
            if tensor.dim() > dim and tensor.shape[dim] == self.full_size:
                tensor = tensor.narrow(dim, 0, kept)
        return tensor


# -- losses ------------------------------------------------------------------------------------------------------------


def classify(shard: BatchShard, loss: _Loss, input: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """`loss`, which is torch's cross_entropy or nll_loss: a mean over the targets of all ranks that count.

    Args:
        input: [tokens, classes], or [batch, classes, tokens]: of this rank.
        target: int64, of this rank or of the full batch.
        options: all others of torch's function.

    Raises:
        InputError: targets are missing.
    """
    outputs = input.numel() // input.shape[1 if input.dim() > 1 else 0]
    target = _own_targets(shard, outputs, target)
    losses = loss(input, target, **options | {"reduction": "none"})
    if options["reduction"] == "none":
        return losses
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if options["reduction"] == "mean":
        counted, weight = target != options["ignore_index"], options["weight"]
        count = counted.sum(dtype=total.dtype) if weight is None else weight[target[counted]].sum(dtype=total.dtype)
        dist.all_reduce(count, group=shard.group)
        total = total / count
    return collectives.total_loss(total, shard.group).to(losses.dtype)


def count_targets(shard: BatchShard | None, target: torch.Tensor, ignore_index: int) -> int:
    """The targets that count on all ranks. `shard`: None if these are those of the full batch."""
    count = (target != ignore_index).sum()
    if shard is not None:
        dist.all_reduce(count, group=shard.group)
    return int(count)


def compare(
    shard: BatchShard, loss: _Loss, input: torch.Tensor, target: torch.Tensor, reduction: str, **options: Any
) -> torch.Tensor:
    """`loss`, which is a function of two tensors of one shape, as torch's mse_loss: its mean over all ranks.

    Raises:
        InputError: a weighted mean.
    """
    if options.get("weight") is not None and reduction == "mean":
        raise InputError(
            f"with parallel.{shard.key} a loss of two tensors cannot be a mean by `weight`, whose sum differs between "
            "the ranks; call it with reduction='none', and weight the losses yourself"
        )
    own = loss(input, shard.cut_if_full(target), reduction=reduction, **options)
    if reduction == "none":
        return own
    total = collectives.total_loss(own, shard.group)
    return total / shard.size if reduction == "mean" else total


def _own_targets(shard: BatchShard, outputs: int, target: torch.Tensor) -> torch.Tensor:
    """The targets of this rank's outputs."""
    if target.is_floating_point():
        raise InputError(f"with parallel.{shard.key} targets have to be the numbers of classes, not probabilities")
    if shard.are_outputs(outputs) and target.numel() == outputs:
        return target
    if shard.are_outputs(outputs) and target.numel() == outputs * shard.size:
        return shard.cut_targets(target)
    has, fix = f"{shard.own} rows", ""
    if shard.dim == TOKENS:
        has = f"{shard.own} tokens of each of {shard.rows} sequences"
        fix = ". Shift the targets of whole sequences, before the call: target = F.pad(ids, (0, 1), value=-100)[:, 1:]"
    raise InputError(
        f"the loss was given {outputs} outputs and {target.numel()} targets; with {shard.key}={shard.size} this rank "
        f"has {has}, and the loss has to take all of them{fix}"
    )
