"""One pass over the gradients: their norm, whether they are finite, how many are zero. The same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import torch_private
from ..shard import Ranks
from ..tensors import in_memory_order
from .collected import CHUNK, Gradients, Kind


@dataclass(slots=True)
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


def measure(
    grads: Gradients,
    ranks: Ranks,
    device: torch.device,
    norm_type: float = 2.0,
    count_zeros: bool = False,
    by_loss: torch.Tensor | None = None,
) -> Verdict:
    """Judge `grads`, local gradients of any dtype, together with those of the other ranks.

    Each element counts with its shard's weight, so that copies on several ranks count once. Accumulated in fp32
    within a chunk and in fp64 above. The verdict follows from the norm, which is inf or nan if any element is. One
    all-reduce of one number (two with `count_zeros`, and two more for each loss); for the maximum norm of one number
    per rank.

    Args:
        device: where the verdict is wanted; gradients may be elsewhere, too.
        by_loss: for each loss what its own gradients, which are in `grads`, held of inf or nan on this rank, and
            whether it was used (shape [2, losses]).
    """
    norm = _local_norm(grads, device, norm_type)
    zeros = [_zeros(grads, device).unsqueeze(0)] if count_zeros else []
    rest = [*zeros, *([] if by_loss is None else [by_loss.flatten()])]
    sums = torch.cat(rest) if rest else None
    if ranks.size > 1:
        norm, sums = _over_ranks(norm, sums, ranks, norm_type)
    found_inf = (~(norm < math.inf)).float()
    losses = None if by_loss is None or sums is None else sums[-by_loss.numel() :].view_as(by_loss)
    return Verdict(norm, found_inf, sums[0] if count_zeros and sums is not None else None, losses)


def _over_ranks(
    norm: torch.Tensor, sums: torch.Tensor | None, ranks: Ranks, norm_type: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norm over all ranks, and the sums of `sums`."""
    if math.isinf(norm_type):
        # SUM over one slot per rank, because a MAX all-reduce loses nan on gloo.
        own = torch.zeros(ranks.size, dtype=torch.float64, device=norm.device)
        own[ranks.rank] = norm
    else:
        own = (norm**norm_type).unsqueeze(0)
    joined = own if sums is None else torch.cat([own, sums])
    ranks.all_reduce(joined)
    own, rest = joined[: own.numel()], joined[own.numel() :]
    norm = own.max() if math.isinf(norm_type) else own[0] ** (1 / norm_type)
    return norm, None if sums is None else rest


def count_nonfinite(grads: Gradients, device: torch.device) -> torch.Tensor:
    """1.0 if `grads` hold inf or nan on this rank, else 0.0 (0-dim float64), without reading them."""
    return (~(_local_norm(grads, device, math.inf) < math.inf)).double()


def first_nonfinite(grads: Gradients) -> str | None:
    """The name of the first parameter whose local gradient holds inf or nan (reads the host once per parameter)."""
    return next((shard.name for shard, grad in grads if not bool(grad.isfinite().all())), None)


def _local_norm(grads: Gradients, device: torch.device, norm_type: float) -> torch.Tensor:
    """This rank's norm (0-dim float64), each element counted with its shard's weight."""
    common = norm_type == 2 or math.isinf(norm_type)  # others add up one element after another on the CPU
    if grads.layout.is_sparse:
        grads.refuse_sparse()
    total: torch.Tensor | None = None
    for kind in grads.layout.kinds or grads.find_kinds():
        pieces, weight = _pieces(kind, grads.tensors), kind.weight
        if not pieces:
            continue
        accumulate = torch.float32 if common and kind.dtype is not torch.float64 else torch.float64
        each = torch.stack(torch_private.foreach_norm(pieces, norm_type, accumulate))
        norm = torch.linalg.vector_norm(each, norm_type, dtype=torch.float64)
        norm = norm if weight == 1 or math.isinf(norm_type) else norm * weight ** (1 / norm_type)
        norm = norm if norm.device == device else norm.to(device)
        total = norm if total is None else torch.linalg.vector_norm(torch.stack([total, norm]), norm_type)
    return torch.zeros((), dtype=torch.float64, device=device) if total is None else total


def _pieces(kind: Kind, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `tensors` that are of this kind, as a norm can take them."""
    if kind.places is not None:
        tensors = [tensors[place] for place in kind.places]
    if kind.whole and list(map(torch.Tensor.numel, tensors)) == kind.sizes:  # strides do not tell sizes
        return tensors
    return [piece for tensor in tensors for piece in _chunks(tensor)]


def _chunks(grad: torch.Tensor) -> Sequence[torch.Tensor]:
    if grad.numel() == 0:
        return ()
    if grad.device.type != "cpu":  # CUDA's kernel works in chunks by itself
        return (grad,)
    return in_memory_order(grad).split(CHUNK)  # the CPU's is fast and exact on contiguous pieces only


def _zeros(grads: Gradients, device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shard, grad in grads:
        total = total + (shard.weight * (grad == 0).sum()).to(device)
    return total
