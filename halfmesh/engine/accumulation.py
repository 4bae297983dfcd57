"""Gradient accumulation: which microbatch of a cycle this is, and how their losses are joined."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..errors import InputError
from ..shard import Ranks

LossReduction = Literal["mean", "sum", "weighted"]


class Accumulation:
    """One cycle of `length` microbatches, and the divisor of their summed gradients.

    Every backward is seeded with 1/`length` (mean) or 1 (sum, weighted), so that gradients stay in the range of one
    microbatch; what is wrong with that in a short cycle, or not known before its end (weighted), is put right by
    `divisor` in the update.
    """

    def __init__(self, length: int, reduction: LossReduction, dp: Ranks) -> None:
        self.length = length
        self.reduction = reduction
        self.index = 0
        """Microbatches of this cycle that are complete."""
        self.seed_divisor = float(length) if reduction == "mean" else 1.0
        """What each loss is divided by in backward."""
        self._dp = dp
        self._weight: torch.Tensor | None = None

    def take_loss(self, loss: Any) -> torch.Tensor:
        """The scalar to run backward from; of a weighted (sum, weight) pair the weight is remembered."""
        plain = self.reduction != "weighted" and isinstance(loss, torch.Tensor)
        if plain and loss.requires_grad and loss.dtype.is_floating_point and loss.ndim == 0:
            return loss
        total, weight = self.read_loss(loss)
        if weight is not None:
            self.add_weight(weight)
        return total

    def add_weight(self, weight: torch.Tensor) -> None:
        """What the summed losses of this cycle are to be divided by grows by `weight` (0-dim, float64)."""
        self._weight = weight if self._weight is None else self._weight + weight

    def read_loss(self, loss: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scalar to run backward from, and the weight of a weighted loss.

        Raises:
            InputError: it is something else.
        """
        if self.reduction != "weighted":
            return _scalar(loss), None
        if not isinstance(loss, (tuple, list)) or len(loss) != 2:
            raise InputError(
                f"loss_reduction='weighted' takes (sum, weight) from the criterion, but a {type(loss).__name__} was "
                "given; return the summed loss and the number it is to be divided by, or use loss_reduction='mean'"
            )
        total, weight = _scalar(loss[0]), loss[1]
        if isinstance(weight, torch.Tensor):
            return total, weight.detach().to(total.device, torch.float64, non_blocking=True)
        return total, torch.full((), float(weight), dtype=torch.float64, device=total.device)  # no copy to wait for

    def divisor(self, microbatches: int) -> float | torch.Tensor:
        """What the gradients of a cycle of `microbatches` still have to be divided by. Weighted: one all-reduce."""
        if self.reduction == "mean":
            return microbatches / self.length
        if self.reduction == "sum" or self._weight is None:
            return 1.0
        total = self._weight.clone()
        self._dp.all_reduce(total)
        return torch.where(total == 0, 1.0, total)  # nothing counted: the gradients are zero anyway

    def reset(self) -> None:
        """Begin a new cycle, forgetting what this one holds."""
        self.index = 0
        self._weight = None


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"backward takes the loss tensor, but a {type(loss).__name__} was given"
            + (
                "; for a criterion that returns (sum, weight) set loss_reduction='weighted'"
                if isinstance(loss, (tuple, list))
                else ""
            )
        )
    if loss.numel() != 1:
        raise InputError(
            f"backward takes a scalar loss, but its shape is {tuple(loss.shape)}; let the criterion reduce it "
            "(reduction='mean'), or call .mean() on it"
        )
    if not loss.is_floating_point():
        raise InputError(f"backward takes a floating-point loss, but its dtype is {loss.dtype}; call .float() before")
    if not loss.requires_grad:
        raise InputError(
            "the loss has no graph to run backward through: it was computed under torch.no_grad(), detached, or no "
            "parameter that requires gradients was used; compute it outside of no_grad, from what engine(...) returned"
        )
    return loss
