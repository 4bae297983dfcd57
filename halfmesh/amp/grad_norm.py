"""Measures the gradients in one pass: their norm, inf or nan, and the number of zeros. All ranks get equal results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import InputError
from ..utils.param_shard import ParamShard, Ranks
from ..utils.tensors import bucket_bytes, by_bytes, in_memory_order

# Local gradients, of any dtype.
Grads = Mapping[ParamShard, torch.Tensor]

# A plain CPU norm of 40 M fp32 elements is 6e-3 too low; in chunks of this many elements the error is 3e-7.
_CHUNK = 65536


@dataclass(slots=True)
class GradStats:
    """Statistics of one step's gradients, equal on all ranks: tensors on the device, which the host has not read.

    Attributes:
        norm: norm over all ranks (0-dim float64) of the gradients, still scaled. inf or nan if one of them is.
        found_inf: 1.0 if any gradient on any rank is inf or nan, else 0.0 (0-dim float32).
        num_zeros: number of gradient elements over all ranks that are exactly zero (0-dim float64), with `count_zeros`.
        flags: the `flags` given to `grad_stats`, summed over the ranks (float64).
    """

    norm: torch.Tensor
    found_inf: torch.Tensor
    num_zeros: torch.Tensor | None
    flags: torch.Tensor | None


def grad_stats(
    grads: Grads, ranks: Ranks, device: torch.device, norm_type: float, count_zeros: bool, flags: torch.Tensor | None
) -> GradStats:
    """Measure `grads` together with those of the other ranks.

    Each element counts with its shard's weight, so that copies on several ranks count once. The norm is accumulated in
    fp32 within a tensor (on the CPU: within a chunk) and in float64 above. It is inf or nan if any element is, so it is
    also the check for overflow. One all-reduce of one number (two with `count_zeros`, and one more for each flag); for
    the maximum norm of one number per rank.

    Args:
        device: the device of the results. Gradients may be on other devices.
        flags: further numbers of this rank to sum over the ranks (float64).

    Raises:
        InputError: a gradient is sparse.
    """
    norm = _local_norm(grads, device, norm_type)
    extra = [_count_zeros(grads, device).unsqueeze(0)] if count_zeros else []
    extra += [] if flags is None else [flags.flatten()]
    if ranks.size > 1:
        norm, *extra = _over_ranks([norm, *extra], ranks, norm_type)
    return GradStats(
        norm=norm,
        found_inf=(norm < math.inf).logical_not_().float(),
        num_zeros=extra[0][0] if count_zeros else None,
        flags=None if flags is None else extra[-1].view_as(flags),
    )


def clip_divisor(divisor: torch.Tensor | None, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The divisor that clips gradients of norm `norm` (still times `divisor`) to a norm of `max_norm` at most.

    It is `divisor` / min(1, max_norm / (norm / divisor + 1e-6)), as in torch.nn.utils.clip_grad_norm_.
    """
    if divisor is None:
        return norm.add(1e-6).div_(max_norm).clamp_(min=1)
    return torch.maximum(divisor, norm.add(divisor, alpha=1e-6).div_(max_norm))


def count_nonfinite(grads: Grads, device: torch.device) -> torch.Tensor:
    """1.0 if `grads` hold inf or nan on this rank, else 0.0 (0-dim float64), without reading them."""
    return (~(_local_norm(grads, device, math.inf) < math.inf)).double()


def first_nonfinite(grads: Grads) -> str | None:
    """The name of the first parameter whose local gradient holds inf or nan (reads the host once per parameter)."""
    return next((shard.name for shard, grad in grads.items() if not bool(grad.isfinite().all())), None)


def _over_ranks(mine: list[torch.Tensor], ranks: Ranks, norm_type: float) -> list[torch.Tensor]:
    """The norm over all ranks of the first of `mine`, and the sums of the others, by one all-reduce."""
    norm = mine[0]
    if math.isinf(norm_type):
        # SUM over one slot per rank, because a MAX all-reduce loses nan on gloo.
        own = torch.zeros(ranks.size, dtype=torch.float64, device=norm.device)
        own[ranks.rank] = norm
    else:
        own = (norm**norm_type).unsqueeze(0)
    sent = [own, *mine[1:]]
    joined = torch.cat(sent) if len(sent) > 1 else own
    dist.all_reduce(joined)
    own, *sums = joined.split([len(x) for x in sent])
    return [own.max() if math.isinf(norm_type) else own[0] ** (1 / norm_type), *sums]


def _local_norm(grads: Grads, device: torch.device, norm_type: float) -> torch.Tensor:
    """This rank's norm (0-dim float64), each element counted with its shard's weight."""
    for shard, grad in grads.items():
        if grad.layout is not torch.strided:
            raise InputError(
                f"the gradient of {shard.name!r} is sparse, which loss scaling, clipping and the gradient norm do not "
                "support; build its layer with sparse=False"
            )
    total: torch.Tensor | None = None
    common = norm_type == 2 or math.isinf(norm_type)  # others add up one element after another on the CPU
    for (weight, dtype, _), same in _by_kind(grads).items():
        chunks = [chunk for grad in same for chunk in _chunks(grad)]
        accumulate = torch.float32 if common and dtype is not torch.float64 else torch.float64
        each = torch.stack(torch._foreach_norm(chunks, norm_type, dtype=accumulate))
        norm = torch.linalg.vector_norm(each, norm_type, dtype=torch.float64)
        if weight != 1 and not math.isinf(norm_type):
            norm = norm * weight ** (1 / norm_type)
        norm = norm.to(device)
        total = norm if total is None else torch.linalg.vector_norm(torch.stack([total, norm]), norm_type)
    return torch.zeros((), dtype=torch.float64, device=device) if total is None else total


def _chunks(grad: torch.Tensor) -> Sequence[torch.Tensor]:
    if (grad.numel() <= _CHUNK and grad.is_contiguous()) or grad.device.type != "cpu":
        return (grad,)  # CUDA's kernel already works in chunks
    return in_memory_order(grad).split(_CHUNK)  # the CPU's is fast and exact on contiguous pieces only


def _count_zeros(grads: Grads, device: torch.device) -> torch.Tensor:
    """The elements of this rank (0-dim float64) that are zero, each counted with its shard's weight."""
    total = torch.full((), sum(s.weight * g.numel() for s, g in grads.items()), dtype=torch.float64, device=device)
    for (weight, _, on), same in _by_kind(grads).items():
        limit = bucket_bytes(on)
        for bucket in by_bytes(same, limit, lambda grad: 4 * grad.numel()):  # copied, so that a few launches count them
            joined = torch.cat([in_memory_order(grad).reshape(-1) for grad in bucket])
            total -= weight * torch.count_nonzero(joined).to(device)
    return total


def _by_kind(grads: Grads) -> dict[tuple[float, torch.dtype, torch.device], list[torch.Tensor]]:
    """The gradients that have elements, by weight, dtype and device: a launch takes one kind."""
    kinds: dict[tuple[float, torch.dtype, torch.device], list[torch.Tensor]] = {}
    for shard, grad in grads.items():
        if grad.numel() > 0:
            kinds.setdefault((shard.weight, grad.dtype, grad.device), []).append(grad)
    return kinds
