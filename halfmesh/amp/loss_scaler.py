"""Loss scaling: changes the scale after each update, scales the seed of backward, and handles several losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..utils.log import get_logger
from ..utils.param_shard import ParamShard, clear_grads, set_grad
from ..utils.tensors import bucket_bytes, by_bytes
from ..utils.torch_private import foreach_copy_, foreach_mul_
from .grad_norm import GradStats, count_nonfinite
from .recipe import HALF, LossScale, Recipe
from .step_result import HostCopy, is_captured

_log = get_logger(__name__)

# Below this fp32 has no full precision, and soon none at all: a scale of zero could not be divided by.
_SMALLEST = 2.0**-126


class LossScaler:
    """Keeps the loss scale in tensors, so that no update needs a host read.

    Use it in this order: seed backward with `scale`, divide the gradients by the same `scale`, decide, step, and
    only then `update`. (Updating first divides by a scale that backward never saw.)

    Rule of `update`, as in Megatron and Colossal-AI: an overflow uses up one of `hysteresis`; when none is left,
    each overflow multiplies the scale by `backoff_factor`, not below `min_scale`. After `growth_interval` updates
    in a row without overflow the scale is multiplied by `growth_factor`, not above `max_scale`, and the hysteresis
    is refilled. With hysteresis 1 this is the rule of `torch.amp.GradScaler`.

    From 1024 with hysteresis 2 and backoff 0.5, the overflows 1, 0, 0, 1, 1, 1 leave the scale at
    1024, 1024, 1024, 512, 256, 128.
    """

    def __init__(self, options: LossScale, device: torch.device) -> None:
        self.options = options
        self._min_scale = max(options.min_scale, _SMALLEST)
        self.scale = torch.tensor(options.initial, dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._hysteresis_left = torch.full((), options.hysteresis, dtype=torch.int32, device=device)

    def update(self, found_inf: torch.Tensor, used: torch.Tensor | None = None) -> None:
        """Move a dynamic scale, in place: a CUDA graph that has captured this moves it with each replay.

        Args:
            found_inf: 0-dim fp32, 1.0 if the step's gradients held inf or nan, else 0.0.
            used: 0-dim bool; False changes nothing. None: it was used.
        """
        if not self.options.dynamic:
            return
        options, tracker, left = self.options, self._growth_tracker, self._hysteresis_left
        state = self.scale, tracker, left
        before = None if used is None else [value.clone() for value in state]
        lowers = found_inf
        if options.hysteresis > 1:
            found = found_inf > 0
            left.sub_(found.int()).clamp_(min=0)
            lowers = found_inf * (left == 0)
            tracker.masked_fill_(found, -1)  # where nothing is lowered the rule below counts one up, to 0
        # GradScaler's rule as one launch: public operators take a dozen.
        torch._amp_update_scale_(
            self.scale, tracker, lowers, options.growth_factor, options.backoff_factor, options.growth_interval
        )
        self.scale.clamp_(self._min_scale, options.max_scale)
        if options.hysteresis > 1:
            left.masked_fill_((tracker == 0).logical_and_(~found), options.hysteresis)  # it has grown
        if used is not None and before is not None:
            for value, old in zip(state, before, strict=True):
                value.copy_(torch.where(used, value, old))

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters, as Python numbers."""
        return {
            "scale": self.scale.item(),
            "max_scale": self.options.max_scale,
            "growth_tracker": int(self._growth_tracker.item()),
            "hysteresis_left": int(self._hysteresis_left.item()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, within this config's bounds. A static scale stays as it is."""
        if not self.options.dynamic:
            return
        self.scale.fill_(min(max(state["scale"], self.options.min_scale), self.options.max_scale))
        self._growth_tracker.fill_(min(state["growth_tracker"], self.options.growth_interval - 1))
        self._hysteresis_left.fill_(min(state["hysteresis_left"], self.options.hysteresis))


class LossScales:
    """Seeds backward with the loss scales, and moves them after each update.

    Where several losses have dynamic scales each has its own. After each backward its gradients are then divided by
    that loss's scale and added in fp32 to the other losses' gradients. An overflow in any of them skips the update;
    only the scale of the loss that overflowed is lowered, and a loss without a backward in this update leaves its scale
    as it was.

    Attributes:
        scalers: empty where nothing is scaled.
        several: each loss has its own scale.
    """

    def __init__(self, recipe: Recipe, device: torch.device, engine: str | None) -> None:
        self._device = device
        options = recipe.loss_scale
        self.several = options is not None and not recipe.keeps_scale
        count = recipe.num_losses if self.several else 1
        self.scalers = [] if options is None else [LossScaler(options, device) for _ in range(count)]
        self._num_losses = recipe.num_losses
        self._prefix = "" if engine is None else f"{engine}: "
        self._is_verbose = options is not None and options.dynamic and options.verbose
        self._to_log: list[HostCopy] = []  # the scales before and after an update
        self._nonfinite: dict[int, torch.Tensor] = {}  # of each loss used in this update: 0-dim float64
        self._stash: dict[ParamShard, torch.Tensor] = {}

    @property
    def scale(self) -> torch.Tensor | None:
        """The scale that gradients have until the update (0-dim fp32, changed in place); None: they are unscaled."""
        return self.scalers[0].scale if self.scalers and not self.several else None

    @property
    def scales(self) -> bool:
        """True if backward scales gradients; False for a static scale of 1."""
        return any(scaler.options.dynamic or scaler.options.initial != 1 for scaler in self.scalers)

    def seed(self, loss: torch.Tensor, divisor: float, loss_id: int = 0) -> torch.Tensor | None:
        """The seed of the backward of `loss`: its loss scale / `divisor`; None for 1."""
        if not self.scalers:
            return None if divisor == 1 else torch.full_like(loss, 1 / divisor)
        scale = self.scalers[loss_id if self.several else 0].scale
        scale = scale.to(torch.promote_types(loss.dtype, torch.float32))  # float64 is divided in float64
        return (scale / divisor).to(loss).expand_as(loss)  # a copy: the scale moves in place

    def grad_divisor(self, divisor: float | torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The loss scale (of loss 0), and the divisor of the gradients: their scale x `divisor`.
        0-dim float64, None for 1."""
        scale = self.scalers[0].scale.double() if self.scalers else None  # a copy: it moves in place
        carried = None if self.several else scale
        if isinstance(divisor, torch.Tensor):
            divisor = divisor.to(self._device, torch.float64)
        elif divisor == 1:
            return scale, carried
        elif carried is None:
            return scale, torch.full((), divisor, dtype=torch.float64, device=self._device)
        return scale, divisor if carried is None else carried * divisor  # type: ignore[return-value]

    def update(self, stats: GradStats) -> None:
        """Move the scales, after the step: the gradients were divided by the scale that backward had."""
        before = [scaler.scale.clone() for scaler in self.scalers] if self._is_verbose else []
        if self.several:
            assert stats.flags is not None
            nonfinite, used = stats.flags
            # Where finite gradients add up to inf or nan no single loss caused it: all scales are lowered.
            overflow_in_sum = stats.found_inf * (nonfinite.sum() == 0)
            found = ((nonfinite + overflow_in_sum) > 0).float()
            for loss_id, scaler in enumerate(self.scalers):
                scaler.update(found[loss_id], used[loss_id] > 0)
        elif self.scalers:
            self.scalers[0].update(stats.found_inf)
        if self._is_verbose and not is_captured(self._device):
            self._to_log.append(HostCopy([*before, *(scaler.scale.clone() for scaler in self.scalers)]))
            while self._to_log and self._to_log[0].arrived:
                self._tell(self._to_log.pop(0).read())

    def _tell(self, scales: Sequence[float]) -> None:
        """Log the changes among the scales before and after an update."""
        count = len(self.scalers)
        for loss_id, (old, new) in enumerate(zip(scales[:count], scales[count:], strict=True)):
            if old != new:
                which = f" of loss {loss_id}" if count > 1 else ""
                why = "; gradients with inf or nan" if new < old else ""
                _log.info("%sloss scale%s %g -> %g%s", self._prefix, which, old, new, why)

    # -- the gradients of several losses -----------------------------------------------------------------------

    def stash_grads(self, shards: Sequence[ParamShard]) -> None:
        """Before a backward: set the gradients of the other losses aside."""
        self._stash.update({shard: grad for shard in shards if (grad := shard.param.grad) is not None})
        clear_grads([shard.param for shard in self._stash])

    def merge_grads(self, loss_id: int, shards: Sequence[ParamShard]) -> None:
        """After the backward of loss `loss_id`: unscale its gradients and add those of the other losses."""
        grads = {shard: grad for shard in shards if (grad := shard.param.grad) is not None}
        self._nonfinite[loss_id] = self._nonfinite.get(loss_id, 0) + count_nonfinite(grads, self._device)
        factor = 1 / self.scalers[loss_id].scale
        limit = bucket_bytes(self._device)
        for bucket in by_bytes(list(grads), limit, lambda shard: 4 * shard.param.numel()):
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
        losses = range(len(self.scalers))
        used = torch.stack([one if loss_id in self._nonfinite else zero for loss_id in losses])
        found = torch.stack([self._nonfinite.get(loss_id, zero) for loss_id in losses])
        return torch.stack([found, used])

    def forget(self) -> None:
        """Forget the gradients: they were used or cleared."""
        self._nonfinite, self._stash = {}, {}

    # -- what is shown and saved -------------------------------------------------------------------------------

    def check_id(self, loss_id: object) -> None:
        """Raise InputError if `loss_id` is not one of the losses."""
        if type(loss_id) is not int or not 0 <= loss_id < self._num_losses:
            allowed = f"0 to {self._num_losses - 1}, by num_losses of mode='apex'"
            raise InputError(f"loss_id={loss_id!r} is not allowed; allowed: {allowed}")

    def current(self) -> tuple[float, ...]:
        """The scale of each loss; 1.0 without loss scaling (reads the host)."""
        scales = [scaler.scale.item() for scaler in self.scalers] or [1.0]
        return tuple(scales) if self.several else (scales[0],) * self._num_losses

    def explain(self) -> str:
        """The state of the scales in words, for an error. Reads the device."""
        scales = ", ".join(f"{scaler.scale.item():g}" for scaler in self.scalers)
        return f"the loss scale is {scales}" if scales else "there is no loss scaling"

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each scaler."""
        return [scaler.state_dict() for scaler in self.scalers]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore `state_dict`."""
        for scaler, state in zip(self.scalers, states, strict=True):
            scaler.load_state_dict(state)


def widen_grads(params: Sequence[torch.Tensor]) -> None:
    """Convert the half-precision gradients of `params` to fp32, so that the next backwards add in fp32."""
    held = [param for param in params if param.grad is not None]
    for param, grad in zip(held, widened([param.grad for param in held]), strict=True):
        set_grad(param, grad)


def widened(grads: Sequence[Any]) -> list[torch.Tensor]:
    """`grads` with those in half precision converted to fp32."""
    half = [grad for grad in grads if grad.dtype in HALF]
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in half]
    if wide:
        foreach_copy_(wide, half)
    converted = iter(wide)
    return [next(converted) if grad.dtype in HALF else grad for grad in grads]
