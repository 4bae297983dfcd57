"""Notices gradients that were changed by others, where they are not what they look like."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import torch_private
from ..log import get_logger
from ..shard import ParamShard

_log = get_logger(__name__)


SCALED = "where they are still multiplied by the loss scale"
UNDIVIDED = (
    "where they still have to be divided: a cycle of fewer batches than gradient_accumulation, or weighted losses, get "
    "their own divisor in the step"
)
SUMMED = "where param.grad holds those of the last backward alone: the ones before it are added up in fp32 beside it"
IN_PARTS = "of which each rank has only its part of the model's, so that a norm over them is not the model's"


class EditWatch:
    """Looks at one gradient as backward left it, and again before the step; warns once.

    Attributes:
        why: what is special about the gradients; None: nothing.
        grad: the one that was looked at.
    """

    def __init__(self, why: str | None = None) -> None:
        self.why = why
        self.grad: torch.Tensor | None = None
        self._stamp = (0, 0)
        self._warned = False

    def note(self, shards: Sequence[ParamShard]) -> None:
        """After a backward, and after a reduction."""
        if self._warned:
            return
        for shard in shards:
            grad = shard.param.grad
            if grad is not None and grad.layout is torch.strided:
                self.grad, self._stamp = grad, torch_private.edit_stamp(grad)
                return
        self.grad = None

    def warn(self, shards: Sequence[ParamShard], undivided: bool) -> None:
        """Before the step: warn if the gradient was changed and is still the one that will be used, and is not what it
        looks like. `undivided`: gradients are divided in the step."""
        grad, self.grad = self.grad, None
        if grad is None or torch_private.edit_stamp(grad) == self._stamp or (self.why is UNDIVIDED and not undivided):
            return
        if self.why is SUMMED and all(shard.main_grad is None for shard in shards):
            return
        if any(shard.param.grad is grad for shard in shards):
            self._warned = True
            _log.warning(
                "gradients were changed between engine.backward and engine.step, %s; to clip them use clip_grad_norm "
                "in the config, or engine.clip_grad_norm_(max_norm)",
                self.why,
            )
