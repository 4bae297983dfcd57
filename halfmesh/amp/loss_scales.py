"""The loss scales of a run: one for all losses, or one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..utils.log import get_logger
from ..utils.param_shard import ParamShard
from .grad_norm import GradStats
from .loss_scaler import LossScaler
from .multi_loss import MultiLoss, widen_grads
from .recipe import Recipe, UpdateOptions
from .step_result import HostCopy, is_captured

_log = get_logger(__name__)


class LossScales:
    """Seeds backward with the loss scales, and moves them after each update.

    Attributes:
        scalers: empty where nothing is scaled; one for each loss where there are several and the scale is dynamic.
        multi: adds up the gradients of losses with separate scales; None: all gradients have the same scale.
    """

    def __init__(self, recipe: Recipe, device: torch.device, update: UpdateOptions) -> None:
        self._device = device
        self._sums_in_fp32 = recipe.wide_gradients or update.wide_gradients
        options = recipe.loss_scale
        count = 0 if options is None else 1 if recipe.keeps_scale else recipe.num_losses
        self.scalers = [LossScaler(options, device) for _ in range(count) if options is not None]
        self.multi = MultiLoss(self.scalers, device) if count > 1 else None
        self._num_losses = recipe.num_losses
        verbose = options is not None and options.dynamic and options.verbose
        self._log = ScaleLog(update.name) if verbose else None

    @property
    def scale(self) -> torch.Tensor | None:
        """The scale that gradients have until the update (0-dim fp32, changed in place); None: they are unscaled."""
        return self.scalers[0].scale if self.scalers and self.multi is None else None

    @property
    def scales(self) -> bool:
        """True if backward scales gradients; False for a static scale of 1."""
        return any(scaler.options.dynamic or scaler.options.initial != 1 for scaler in self.scalers)

    def seed(self, loss: torch.Tensor, divisor: float, loss_id: int = 0) -> torch.Tensor | None:
        """The seed of the backward of `loss`: its loss scale / `divisor`; None for 1."""
        if not self.scalers:
            return None if divisor == 1 else torch.full_like(loss, 1 / divisor)
        scaler = self.scalers[0 if self.multi is None else loss_id]
        scale = scaler.scale.to(torch.promote_types(loss.dtype, torch.float32))  # float64 is divided in float64
        seed = (scale / divisor).to(loss)  # a copy: the scale moves in place
        return seed if loss.ndim == 0 else seed.expand_as(loss)

    def before_backward(self, receivers: Sequence[ParamShard]) -> None:
        """Prepare the existing gradients of `receivers` for more."""
        if self.multi is not None:
            self.multi.stash_grads(receivers)
        elif self._sums_in_fp32:
            widen_grads([shard.param for shard in receivers])

    def after_backward(self, loss_id: int, receivers: Sequence[ParamShard]) -> None:
        """Take in the gradients of loss `loss_id`."""
        if self.multi is not None:
            self.multi.merge_grads(loss_id, receivers)

    def forget_grads(self) -> None:
        """Forget the gradients: they were used or cleared."""
        if self.multi is not None:
            self.multi.forget()

    def grad_divisor(self, divisor: float | torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The loss scale (of loss 0), and the divisor of the gradients: their scale x `divisor`.
        0-dim float64, None for 1."""
        scale = self.scalers[0].scale.double() if self.scalers else None  # a copy: it moves in place
        carried = None if self.multi is not None else scale
        if isinstance(divisor, torch.Tensor):
            divisor = divisor.to(self._device, torch.float64)
            return scale, divisor if carried is None else carried * divisor
        if divisor == 1:
            return scale, carried
        if carried is None:
            return scale, torch.full((), divisor, dtype=torch.float64, device=self._device)
        return scale, carried * divisor

    def update(self, stats: GradStats) -> None:
        """Move the scales, after the step: the gradients were divided by the scale that backward had."""
        before = [scaler.scale.clone() for scaler in self.scalers] if self._log is not None else []
        if self.multi is not None:
            self.multi.update(stats)
        elif self.scalers:
            self.scalers[0].update(stats.found_inf)
        if self._log is not None:
            self._log.record(before, [scaler.scale for scaler in self.scalers])

    def check_id(self, loss_id: object) -> None:
        """Raise InputError if `loss_id` is not one of the losses."""
        if type(loss_id) is int and 0 <= loss_id < self._num_losses:
            return
        raise InputError(
            f"loss_id={loss_id!r} is not one of {self._num_losses} loss(es); allowed: 0 to {self._num_losses - 1}; "
            "num_losses of mode='apex' says how many there are"
        )

    def current(self) -> tuple[float, ...]:
        """The scale of each loss; 1.0 without loss scaling (reads the host)."""
        scales = [scaler.scale.item() for scaler in self.scalers] or [1.0]
        return tuple(scales) if self.multi is not None else (scales[0],) * self._num_losses

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each scaler."""
        return [scaler.state_dict() for scaler in self.scalers]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore `state_dict`."""
        for scaler, state in zip(self.scalers, states, strict=True):
            scaler.load_state_dict(state)


class ScaleLog:
    """Logs each change of the loss scales; on a GPU some updates late, when it is known on the host."""

    def __init__(self, engine: str | None) -> None:
        self._prefix = "" if engine is None else f"{engine}: "
        self._pending: list[HostCopy] = []  # the scales before and after an update

    def record(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
        """Record the scales (0-dim) before and after an update. (Replays of a CUDA graph are not logged.)"""
        if is_captured(after[0].device):
            return
        self._pending.append(HostCopy([*before, *(scale.clone() for scale in after)]))
        while self._pending and self._pending[0].arrived:
            self._tell(self._pending.pop(0).read())

    def _tell(self, scales: list[float]) -> None:
        half = len(scales) // 2
        for loss_id, (old, new) in enumerate(zip(scales[:half], scales[half:], strict=True)):
            if old != new:
                which = f" of loss {loss_id}" if half > 1 else ""
                why = "; gradients with inf or nan" if new < old else ""
                _log.info("%sloss scale%s %g -> %g%s", self._prefix, which, old, new, why)
