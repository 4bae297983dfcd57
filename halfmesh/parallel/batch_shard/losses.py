"""Losses of the full batch, which each rank computes from its outputs. Gradients are multiplied by the number of ranks,
since the reduction afterwards takes the mean over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InputError
from .. import collectives
from .shard import TOKENS, BatchShard

_Loss = Callable[..., torch.Tensor]


def classify(
    shard: BatchShard,
    loss: _Loss,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> torch.Tensor:
    """`loss`, which is torch's cross_entropy or nll_loss: a mean over the targets of all ranks that count.

    Args:
        input: [tokens, classes], or [batch, classes, tokens]: of this rank.
        target: int64, of this rank or of the full batch.

    Raises:
        InputError: targets are missing.
    """
    outputs = input.numel() // input.shape[1 if input.dim() > 1 else 0]
    target = _own_targets(shard, outputs, target)
    losses = loss(input, target, weight, ignore_index=ignore_index, reduction="none", **options)
    if reduction == "none":
        return losses
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if reduction == "mean":
        counted = target != ignore_index
        count = counted.sum(dtype=total.dtype) if weight is None else weight[target[counted]].sum(dtype=total.dtype)
        dist.all_reduce(count, group=shard.group)
        total = total / count
    return collectives.total_loss(total, shard.group).to(losses.dtype)


def count_targets(
    shard: BatchShard | None,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    *_: Any,
    **__: Any,
) -> int:
    """The number of targets of cross_entropy or nll_loss that count on all ranks. `shard`: None if these are those of
    the full batch."""
    count = (target != ignore_index).sum()
    if shard is not None:
        dist.all_reduce(count, group=shard.group)
    return int(count)


def compare(
    shard: BatchShard,
    loss: _Loss,
    input: torch.Tensor,
    target: torch.Tensor,
    *args: Any,
    reduction: str = "mean",
    **options: Any,
) -> torch.Tensor:
    """`loss`, which is a function of two tensors of one shape, as torch's mse_loss: its mean over all ranks.

    Raises:
        InputError: a weighted mean.
    """
    if options.get("weight") is not None and reduction == "mean":
        raise InputError(
            f"with parallel.{shard.key} a loss of two tensors cannot be a mean by `weight`, whose sum differs between "
            "the ranks; call it with reduction='none', and weight and add up the losses outside of the model"
        )
    own = loss(input, shard.cut_if_whole(target), *args, reduction=reduction, **options)
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
        fix = (
            ". Shift the targets of whole sequences, before the call: target = F.pad(ids, (0, 1), value=-100)[:, 1:]; "
            "outputs[:, :-1] would leave out a token of each rank"
        )
    raise InputError(
        f"the loss was given {outputs} outputs and {target.numel()} targets; with {shard.key}={shard.size} this rank "
        f"has {has}, and the loss has to take all of them{fix}"
    )
