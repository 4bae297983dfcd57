"""The loss scaler of every mode: static or dynamic, with hysteresis, floor and ceiling, all of it on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .recipe import LossScale

_SMALLEST = 2.0**-126
"""Below this fp32 has no full precision, and soon none at all: a scale of zero could not be divided by."""


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
        self._hysteresis_left.fill_(state["hysteresis_left"])
