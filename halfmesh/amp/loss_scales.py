"""The loss scale of each loss: what backward starts with, and how gradients with different scales come together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from .. import torch_private
from ..errors import InputError
from ..log import get_logger
from ..shard import ParamShard, clear_grads, set_grad
from .collected import Gradients
from .loss_scaler import LossScaler
from .master_weights import STREAM_BYTES, by_bytes
from .recipe import HALF, Recipe
from .scale_log import ScaleLog
from .verdict import Verdict, count_nonfinite

# The seed of an fp16 loss is itself fp16: 2**15 is the largest power of two that fits (the maximum is 65504).
FP16_SEED_LIMIT = 2.0**15

_log = get_logger(__name__)


class LossScales:
    """One scaler, or with a dynamic scale and several losses one for each.

    One scaler: gradients of all losses add up with its scale, and the update divides by it.

    Several, as in apex: after each backward its gradients are divided by that loss's scale and added in fp32 to those
    of the other losses. An overflow in any of them skips the step; only the scale of the loss that overflowed is
    lowered, and a loss without a backward in this update leaves its scale as it was.

    Attributes:
        ids: of the losses.
        scalers: empty where nothing is scaled.
        first: that of loss 0.
        scale: the one that complete gradients still carry (0-dim, moved in place), or None if they carry none.
        several: whether gradients are unscaled after each backward.
        wide_sums: whether half-precision gradients of several backwards are added in fp32.
    """

    def __init__(self, recipe: Recipe, device: torch.device, wide_sums: bool = False, name: str | None = None) -> None:
        options = recipe.loss_scale
        self.several = options is not None and not recipe.keeps_scale
        count = 0 if options is None else recipe.num_losses if self.several else 1
        self.scalers = [LossScaler(options, device) for _ in range(count) if options is not None]
        self.wide_sums = wide_sums or recipe.wide_gradients
        self._num_losses = recipe.num_losses
        self._name = name
        self.ids = range(recipe.num_losses)
        self._device = device
        self._nonfinite: dict[int, torch.Tensor] = {}
        self._aside: dict[ParamShard, torch.Tensor] = {}  # gradients of the other losses, while one runs backward
        self._tells = options is not None and options.dynamic and options.verbose
        self.first = self.scalers[0] if self.scalers else None
        self.scale = None if self.several or self.first is None else self.first.scale
        self._restart_log()

    def _restart_log(self) -> None:
        """What the scales are now was not brought about by an update."""
        self._log = ScaleLog([scaler.scale for scaler in self.scalers], self._name) if self._tells else None

    def seed(self, loss: torch.Tensor, loss_id: int, divisor: float) -> torch.Tensor | None:
        """The gradient that backward of `loss` starts with: its scale / `divisor`; None where that is 1."""
        scaler = self.scalers[loss_id] if self.several else self.first
        if scaler is None:
            return None if divisor == 1 else torch.full_like(loss, 1 / divisor)
        seed = (scaler.scale / divisor).to(loss)  # never the scale itself, which moves in place
        return seed if loss.ndim == 0 else seed.expand_as(loss)

    def prepare(self, shards: Sequence[ParamShard]) -> None:
        """Before a backward: what is there already becomes fp32 where it is added up so; of several losses it is kept
        apart from what comes."""
        for shard in shards if self.several or self.wide_sums else ():
            grad = shard.param.grad
            if grad is not None and self.several:
                self._aside[shard] = _widen(grad)
                clear_grads([shard.param])
            elif grad is not None and grad.dtype in HALF:
                set_grad(shard.param, _widen(grad))

    def collect(self, loss_id: int, shards: Sequence[ParamShard]) -> None:
        """After a backward: with several losses, unscale its gradients and add them to those of the others."""
        if not self.several:
            return
        new = {shard: grad for shard in shards if (grad := shard.param.grad) is not None}
        found = count_nonfinite(Gradients.of(new.items()), self._device)
        self._nonfinite[loss_id] = self._nonfinite.get(loss_id, 0) + found
        factor = 1 / self.scalers[loss_id].scale
        for bucket in by_bytes(list(new), STREAM_BYTES):  # so that few fp32 copies of fp16 gradients exist at a time
            wide = [_widen(new.pop(shard)) for shard in bucket]
            torch_private.foreach_mul_(wide, factor)
            for shard, grad in zip(bucket, wide, strict=True):
                held = self._aside.pop(shard, None)
                set_grad(shard.param, grad if held is None else held.add_(grad))
        for shard, held in self._aside.items():  # this loss gave it none
            set_grad(shard.param, held)
        self._aside = {}

    def by_loss(self) -> torch.Tensor | None:
        """For each loss how many pieces of its gradients were inf or nan on this rank, and whether it was used here.

        Shape [2, losses], float64; None with one scaler.
        """
        if not self.several:
            return None
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        one = torch.ones_like(zero)  # made there: a CUDA graph cannot capture a copy from the host
        losses = range(len(self.scalers))
        used = torch.stack([one if loss_id in self._nonfinite else zero for loss_id in losses])
        found = torch.stack([self._nonfinite.get(loss_id, zero) for loss_id in losses])
        return torch.stack([found, used])

    def update(self, verdict: Verdict) -> None:
        """Move the scales that were used in this update, on any rank."""
        if verdict.by_loss is None:
            for scaler in self.scalers:
                scaler.update(verdict.found_inf)
        else:
            nonfinite, used = verdict.by_loss
            # Sums of finite gradients that are not finite are no single loss's fault: all are lowered.
            blameless = verdict.found_inf * (nonfinite.sum() == 0)
            found = ((nonfinite + blameless) > 0).float()
            for loss_id, scaler in enumerate(self.scalers):
                scaler.update(found[loss_id], used[loss_id] > 0)
        if self._log is not None:
            self._log.note([scaler.scale for scaler in self.scalers])

    def current(self) -> tuple[float, ...]:
        """The scale of each loss; 1.0 without loss scaling (reads the host)."""
        scales = [scaler.scale.item() for scaler in self.scalers] or [1.0]
        return tuple(scales) if self.several else (scales[0],) * self._num_losses

    def forget(self) -> None:
        """The gradients are used or cleared."""
        self._nonfinite, self._aside = {}, {}

    def cap(self, loss_id: int, shards: Sequence[ParamShard]) -> None:
        """Keep the scale of a loss at or below 2**15, because its backward starts in fp16 with the loss scale itself.

        Gradients of this update that are there already (of `shards`) get the lower scale, too.

        Raises:
            InputError: a static scale is above it.
        """
        scaler = self.scalers[loss_id] if self.several else self.first
        before = None if scaler is None else scaler.scale.clone()
        reason = "the loss itself is fp16, and its gradient is the loss scale, in fp16"
        if scaler is None or before is None or not scaler.cap(FP16_SEED_LIMIT, reason):
            return
        _log.warning("the loss scale is kept at or below %g: %s", FP16_SEED_LIMIT, reason)
        held = [grad for shard in shards if (grad := shard.param.grad) is not None]
        if held and not self.several:
            torch_private.foreach_mul_(held, scaler.scale / before)
        self._restart_log()

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each scaler."""
        return [scaler.state_dict() for scaler in self.scalers]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue exactly where `state_dict` was taken."""
        for scaler, state in zip(self.scalers, states, strict=True):
            scaler.load_state_dict(state)
        self._restart_log()

    def refuse(self, loss_id: object) -> NoReturn:
        """Raise InputError: `loss_id` is not that of one of the losses."""
        if self._num_losses == 1:
            raise InputError(
                f"loss_id={loss_id!r} was given, but there is one loss; only mode='apex' has several "
                "(num_losses=2); leave loss_id out"
            )
        raise InputError(
            f"loss_id={loss_id!r} is not one of the num_losses={self._num_losses} losses; allowed: 0 to "
            f"{self._num_losses - 1}, or set num_losses in the config"
        )


def _widen(grad: torch.Tensor) -> torch.Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32))
