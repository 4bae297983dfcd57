"""Several losses with separate loss scales, as in apex (`num_losses`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..utils.param_shard import ParamShard, clear_grads, set_grad
from ..utils.torch_private import foreach_copy_, foreach_mul_
from .grad_norm import GradStats, count_nonfinite
from .loss_scaler import LossScaler
from .master_weights import bucket_bytes, by_bytes
from .recipe import HALF


class MultiLoss:
    """Adds up the gradients of losses that have different scales.

    After each backward its gradients are divided by that loss's scale and added in fp32 to the other losses' gradients.
    An overflow in any of them skips the update; only the scale of the loss that overflowed is lowered, and a loss
    without a backward in this update leaves its scale as it was.
    """

    def __init__(self, scalers: Sequence[LossScaler], device: torch.device) -> None:
        self._scalers = scalers
        self._device = device
        self._nonfinite: dict[int, torch.Tensor] = {}  # of each loss used in this update: 0-dim float64
        self._stash: dict[ParamShard, torch.Tensor] = {}

    def stash_grads(self, shards: Sequence[ParamShard]) -> None:
        """Before a backward: set the gradients of the other losses aside."""
        for shard in shards:
            if shard.param.grad is not None:
                self._stash[shard] = shard.param.grad
        clear_grads([shard.param for shard in self._stash])

    def merge_grads(self, loss_id: int, shards: Sequence[ParamShard]) -> None:
        """After the backward of loss `loss_id`: unscale its gradients and add those of the other losses."""
        grads = {shard: grad for shard in shards if (grad := shard.param.grad) is not None}
        self._nonfinite[loss_id] = self._nonfinite.get(loss_id, 0) + count_nonfinite(grads, self._device)
        factor = 1 / self._scalers[loss_id].scale
        limit = bucket_bytes(self._device, sum(grad.numel() for grad in grads.values()))
        for bucket in by_bytes(list(grads), limit, lambda shard: shard.param.numel()):
            wide = widened([grads.pop(shard) for shard in bucket])
            foreach_mul_(wide, factor)
            earlier = {shard: self._stash.pop(shard) for shard in bucket if shard in self._stash}
            if earlier:
                added = [grad for shard, grad in zip(bucket, wide, strict=True) if shard in earlier]
                torch._foreach_add_(added, list(earlier.values()))
            for shard, grad in zip(bucket, wide, strict=True):
                set_grad(shard.param, grad)
        for shard, grad in self._stash.items():  # this loss gave them none
            set_grad(shard.param, grad)
        self._stash = {}

    def flags(self) -> torch.Tensor:
        """For each loss the number of its backwards that gave inf or nan on this rank, and 1 if it was used here.

        Shape [2, losses], float64.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        one = torch.ones_like(zero)  # made there: a CUDA graph cannot capture a copy from the host
        losses = range(len(self._scalers))
        used = torch.stack([one if loss_id in self._nonfinite else zero for loss_id in losses])
        found = torch.stack([self._nonfinite.get(loss_id, zero) for loss_id in losses])
        return torch.stack([found, used])

    def update(self, stats: GradStats) -> None:
        """Move the scales of the losses that any rank used in this update."""
        assert stats.flags is not None
        nonfinite, used = stats.flags
        # Where finite gradients add up to inf or nan it is no single loss's fault: all scales are lowered.
        overflow_in_sum = stats.found_inf * (nonfinite.sum() == 0)
        found = ((nonfinite + overflow_in_sum) > 0).float()
        for loss_id, scaler in enumerate(self._scalers):
            scaler.update(found[loss_id], used[loss_id] > 0)

    def forget(self) -> None:
        """Forget the gradients: they were used or cleared."""
        self._nonfinite, self._stash = {}, {}


def widen_grads(params: Sequence[torch.Tensor]) -> None:
    """Convert the half-precision gradients of `params` to fp32, so that the next backwards add in fp32."""
    held = [param for param in params if param.grad is not None]
    for param, grad in zip(held, widened([param.grad for param in held]), strict=True):
        if grad is not param.grad:
            set_grad(param, grad)


def widened(grads: Sequence[Any]) -> list[torch.Tensor]:
    """`grads` with those in half precision converted to fp32."""
    half = [grad for grad in grads if grad.dtype in HALF]
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in half]
    if wide:
        foreach_copy_(wide, half)
    converted = iter(wide)
    return [next(converted) if grad.dtype in HALF else grad for grad in grads]
