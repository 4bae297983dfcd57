"""One pass over the gradients: their norm, whether they are finite, how many are zero. The same on every rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import torch_private
from ..errors import InputError
from ..shard import ParamShard, Ranks
from ..strides import in_memory_order

# A plain CPU norm of 40 M fp32 elements is 6e-3 too low; in chunks of this many elements the error is 3e-7.
CHUNK = 65536


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on about one step's gradients. Tensors are 0-dim, on the device, unread by the host."""

    norm: torch.Tensor
    """Norm over all ranks (float64) of the gradients as they are, that is still scaled. inf or nan where they are."""
    found_inf: torch.Tensor
    """1.0 if any gradient on any rank is inf or nan, else 0.0 (float32)."""
    num_zeros: torch.Tensor | None
    """Number of gradient elements over all ranks that are exactly zero (float64), if it was asked for."""
    by_loss: torch.Tensor | None = None
    """For each loss, nonzero if its own gradients held inf or nan on any rank, and if it was used on any (shape
    [2, losses]), if the losses were told apart."""


@torch.no_grad()
def measure(
    grads: Sequence[tuple[ParamShard, torch.Tensor]],
    ranks: Ranks,
    device: torch.device,
    norm_type: float = 2.0,
    count_zeros: bool = False,
    by_loss: torch.Tensor | None = None,
) -> Verdict:
    """Judge `grads`, pairs of a shard and its local gradient (any dtype), together with those of the other ranks.

    Each element counts with its shard's weight, so that copies on several ranks count once. Accumulated in fp32
    within a chunk and in fp64 above. One all-reduce of two numbers (three with `count_zeros`, and one more for each
    loss); for the maximum norm of two numbers per rank.

    Args:
        by_loss: for each loss what its own gradients, which are in `grads`, held of inf or nan on this rank, and
            whether it was used (shape [2, losses]).
    """
    power, bad = _local_sums(grads, device, norm_type)
    zeros = [_zeros(grads, device)] if count_zeros else []
    rest = [torch.stack([bad, *zeros]), *([] if by_loss is None else [by_loss.flatten()])]
    if math.isinf(norm_type):
        # SUM over one slot per rank, because a MAX all-reduce loses nan on gloo.
        slots = torch.zeros(ranks.size, dtype=torch.float64, device=device)
        slots[ranks.rank] = power
        joined = torch.cat([slots, *rest])
        ranks.all_reduce(joined)
        norm, sums = joined[: ranks.size].max(), joined[ranks.size :]
    else:
        joined = torch.cat([power.unsqueeze(0), *rest])
        ranks.all_reduce(joined)
        norm, sums = joined[0] ** (1 / norm_type), joined[1:]
    losses = None if by_loss is None else sums[-by_loss.numel() :].view_as(by_loss)
    return Verdict(norm, (sums[0] > 0).float(), sums[1] if count_zeros else None, losses)


def count_nonfinite(grads: Sequence[tuple[ParamShard, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """How many pieces of `grads` hold inf or nan (0-dim float64), on this rank, without reading them."""
    return _local_sums(grads, device, math.inf)[1]


def first_nonfinite(grads: Sequence[tuple[ParamShard, torch.Tensor]]) -> str | None:
    """The name of the first parameter whose local gradient holds inf or nan (reads the host once per parameter)."""
    return next((shard.name for shard, grad in grads if not bool(grad.isfinite().all())), None)


def _local_sums(
    grads: Sequence[tuple[ParamShard, torch.Tensor]], device: torch.device, norm_type: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[sum of weight * |g|^p, or the maximum of |g|] and the count of non-finite pieces, both float64.

    Raises:
        InputError: a gradient is sparse.
    """
    for shard, grad in grads:
        if grad.layout != torch.strided:
            raise InputError(
                f"the gradient of {shard.name!r} is sparse ({grad.layout}), which loss scaling, clipping and the "
                "gradient norm do not support; build its layer with sparse=False"
            )
    zero = torch.zeros((), dtype=torch.float64, device=device)
    power, bad = zero, zero
    by_weight: dict[tuple[float, bool], list[torch.Tensor]] = defaultdict(list)
    for shard, grad in grads:
        by_weight[shard.weight, grad.dtype == torch.float64].extend(_chunks(grad))
    for (weight, is_double), pieces in by_weight.items():
        common = norm_type == 2 or math.isinf(norm_type)  # others add up one element after another on the CPU
        accumulate = torch.float32 if common and not is_double else torch.float64
        norms = torch.stack(torch_private.foreach_norm(pieces, norm_type, accumulate)).double()
        bad = bad + (~norms.isfinite()).sum()
        power = (
            torch.maximum(power, norms.max()) if math.isinf(norm_type) else power + weight * (norms**norm_type).sum()
        )
    return power, bad


def _chunks(grad: torch.Tensor) -> Sequence[torch.Tensor]:
    if grad.numel() == 0:
        return ()
    small = grad.numel() <= CHUNK and grad.is_contiguous()
    if small or grad.device.type != "cpu":  # CUDA's kernel works in chunks by itself
        return (grad,)
    return in_memory_order(grad).split(CHUNK)  # the CPU's is fast and exact on contiguous pieces only


def _zeros(grads: Sequence[tuple[ParamShard, torch.Tensor]], device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shard, grad in grads:
        total = total + shard.weight * (grad == 0).sum()
    return total
