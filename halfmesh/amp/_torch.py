"""Private names of torch that amp needs; those that other rooms need, too, are in halfmesh/_torch.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle


class ScaleRule(Protocol):
    """How a dynamic loss scale moves."""

    @property
    def growth_factor(self) -> float: ...
    @property
    def backoff_factor(self) -> float: ...
    @property
    def growth_interval(self) -> int: ...


def update_scale_(scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, rule: ScaleRule) -> None:
    """Move `scale` (0-dim fp32) and `tracker` (0-dim int32) in place, with the rule of `torch.amp.GradScaler.update`.

    Args:
        found_inf: 0-dim, not 0 if the gradients held inf or nan.
    """
    found, wide = found_inf != 0, scale.double()  # GradScaler multiplies in float64, and rounds once
    grown, lowered = (wide * rule.growth_factor).float(), (wide * rule.backoff_factor).float()
    tracker.add_(1)
    due = tracker == rule.growth_interval
    scale.copy_(torch.where(found, lowered, torch.where(due & grown.isfinite(), grown, scale)))
    tracker.masked_fill_(found | due, 0)


def foreach_norm(tensors: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor, summed in `dtype`; 0-dim results. `tensors` must not be empty."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype))


def has_step_pre_hooks(optimizer: torch.optim.Optimizer, besides: RemovableHandle | None = None) -> bool:
    """Whether hooks of `optimizer` run before its step; `besides` is not counted. (Those that are registered for all
    optimizers of the process are not looked at.)"""
    return bool(set(optimizer._optimizer_step_pre_hooks) - ({besides.id} if besides else set()))


def has_step_hooks(optimizer: torch.optim.Optimizer, besides: RemovableHandle | None = None) -> bool:
    """Whether hooks of `optimizer` run before or after its step, as `has_step_pre_hooks` counts them."""
    return bool(optimizer._optimizer_step_post_hooks) or has_step_pre_hooks(optimizer, besides)
