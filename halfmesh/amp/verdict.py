"""One pass over the gradients: their norm, whether they are finite, how many are zero. The same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from .. import torch_private
from ..errors import InputError
from ..shard import ParamShard, Ranks
from ..strides import in_memory_order

# A plain CPU norm of 40 M fp32 elements is 6e-3 too low; in chunks of this many elements the error is 3e-7.
CHUNK = 65536

_layout, _dtype, _device = attrgetter("layout"), attrgetter("dtype"), attrgetter("device")


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
    grads: Sequence[tuple[ParamShard, torch.Tensor]],
    ranks: Ranks,
    device: torch.device,
    norm_type: float = 2.0,
    count_zeros: bool = False,
    by_loss: torch.Tensor | None = None,
) -> Verdict:
    """Judge `grads`, pairs of a shard and its local gradient (any dtype), together with those of the other ranks.

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
    found_inf = (norm < math.inf).logical_not_().float()
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


def count_nonfinite(grads: Sequence[tuple[ParamShard, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """1.0 if `grads` hold inf or nan on this rank, else 0.0 (0-dim float64), without reading them."""
    return (_local_norm(grads, device, math.inf) < math.inf).logical_not_().double()


def first_nonfinite(grads: Sequence[tuple[ParamShard, torch.Tensor]]) -> str | None:
    """The name of the first parameter whose local gradient holds inf or nan (reads the host once per parameter)."""
    return next((shard.name for shard, grad in grads if not bool(grad.isfinite().all())), None)


def _local_norm(
    grads: Sequence[tuple[ParamShard, torch.Tensor]], device: torch.device, norm_type: float
) -> torch.Tensor:
    """This rank's norm (0-dim float64), each element counted with its shard's weight."""
    common = norm_type == 2 or math.isinf(norm_type)  # others add up one element after another on the CPU
    norms = []
    for (weight, dtype, _), tensors in _by_kind(grads).items():
        sizes = list(map(torch.Tensor.numel, tensors))
        whole = min(sizes) > 0 and max(sizes) <= CHUNK and all(map(torch.Tensor.is_contiguous, tensors))
        pieces = tensors if whole else [piece for tensor in tensors for piece in _chunks(tensor)]
        if not pieces:
            continue
        accumulate = torch.float32 if common and dtype is not torch.float64 else torch.float64
        each = torch.stack(torch_private.foreach_norm(pieces, norm_type, accumulate))
        norm = torch.linalg.vector_norm(each, norm_type, dtype=torch.float64)
        norm = norm if weight == 1 or math.isinf(norm_type) else norm * weight ** (1 / norm_type)
        norms.append(norm if norm.device == device else norm.to(device))
    if len(norms) == 1:
        return norms[0]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _by_kind(
    grads: Sequence[tuple[ParamShard, torch.Tensor]],
) -> dict[tuple[float, torch.dtype, torch.device], list[torch.Tensor]]:
    """The gradients by their shard's weight, their dtype and device. Mostly one kind; this is done at each step.

    Raises:
        InputError: a gradient is sparse.
    """
    tensors = [grad for _, grad in grads]
    if set(map(_layout, tensors)) - {torch.strided}:
        name, layout = next((shard.name, grad.layout) for shard, grad in grads if grad.layout != torch.strided)
        raise InputError(
            f"the gradient of {name!r} is sparse ({layout}), which loss scaling, clipping and the gradient norm do not "
            "support; build its layer with sparse=False"
        )
    kinds = list(zip([shard.weight for shard, _ in grads], map(_dtype, tensors), map(_device, tensors), strict=True))
    if len(set(kinds)) == 1:
        return {kinds[0]: tensors}
    alike: dict[tuple[float, torch.dtype, torch.device], list[torch.Tensor]] = {kind: [] for kind in kinds}
    for kind, tensor in zip(kinds, tensors, strict=True):
        alike[kind].append(tensor)
    return alike


def _chunks(grad: torch.Tensor) -> Sequence[torch.Tensor]:
    if grad.numel() == 0:
        return ()
    if grad.device.type != "cpu":  # CUDA's kernel works in chunks by itself
        return (grad,)
    return in_memory_order(grad).split(CHUNK)  # the CPU's is fast and exact on contiguous pieces only


def _zeros(grads: Sequence[tuple[ParamShard, torch.Tensor]], device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shard, grad in grads:
        total = total + (shard.weight * (grad == 0).sum()).to(device)
    return total
