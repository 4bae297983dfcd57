"""Notices gradients that others have made or changed, where an update would use them wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from .._torch import versions
from ..errors import InputError, shorten
from ..log import get_logger
from ..shard import ParamShard
from .master_weights import MasterWeights

_log = get_logger(__name__)

SCALED = "where they are still multiplied by the loss scale"
UNDIVIDED = (
    "where they still have to be divided: a cycle of fewer batches than gradient_accumulation, or weighted losses, get "
    "their own divisor in the step"
)
SHARDED = "where each rank has its shards of them only, so that a norm over them is not the model's"

_STRAY = (
    "gradients of %s were there before the first engine.backward of an update: a loss.backward() of your own, or "
    "another engine's backward, left them. %s. Call engine.backward(loss) for every loss that trains these parameters, "
    "and engine.zero_grad() before it to drop what other losses left"
)
_CHANGED = (
    "gradients were changed between engine.backward and engine.step (of %s), %s; to clip them use clip_grad_norm in "
    "the config, or engine.clip_grad_norm_(max_norm), and in place of loss.backward() call engine.backward(loss)"
)

_Noted = tuple[Sequence[ParamShard], Sequence[ParamShard], list[torch.Tensor | None], list[int]]
_NOTHING: _Noted = ((), (), [], [])


class GradientWatch:
    """Remembers which gradients the last backward left, and their versions. Warns once of each kind of mistake.

    Attributes:
        why: why gradients must not be changed between backward and step, for the warning; None: they may be.
    """

    def __init__(self, master_weights: MasterWeights, is_scaled: bool) -> None:
        self._master_weights = master_weights
        self.why = SCALED if is_scaled else None
        self._is_scaled = is_scaled
        self._warned: set[str] = set()
        self._noted: _Noted = _NOTHING

    def forget(self) -> None:
        """The gradients are used or cleared."""
        self._noted = _NOTHING

    def note(self) -> None:
        """After a backward, and the reduction if it was the last: remember the gradients, for `check`."""
        masters = self._master_weights
        if self.why is None and masters.receivers == masters.trained:
            return  # as in a loop by hand, where gradients may be changed, and no shards of them are kept elsewhere
        grads = [shard.param.grad for shard in masters.receivers]
        self._noted = masters.trained, masters.receivers, grads, versions(grads)

    def check(self, divisor: float | torch.Tensor = 1.0) -> None:
        """Warn of gradients that were changed since `note`, and take shards of them again.

        Args:
            divisor: the step that follows divides them by it, besides the loss scale.
        """
        trained, receivers, before, old_versions = self._noted
        if not receivers:
            return
        self._noted = _NOTHING
        now = [shard.param.grad for shard in receivers]
        now_versions = versions(now)
        if now_versions == old_versions and all(map(is_, now, before)):
            return
        names = []
        for shard, old, new, old_version, version in zip(trained, before, now, old_versions, now_versions, strict=True):
            if new is old and version == old_version:
                continue
            if new is not None:
                names.append(shard.name)
            if shard.source is not None:
                shard.rebind_grad()
        is_divided = isinstance(divisor, torch.Tensor) or divisor != 1
        if names and self.why is not None and (self.why is not UNDIVIDED or is_divided):
            self._warn(_CHANGED, shorten(names), self.why)

    def check_empty(self) -> None:
        """Before the first backward of an update.

        Raises:
            InputError: others left gradients, which the update would divide by the loss scale.
        """
        strays = [shard.name for shard in self._master_weights.receivers if shard.param.grad is not None]
        if strays and self._is_scaled:
            raise InputError(_STRAY % (shorten(strays), "The update would divide them by the loss scale"))
        if strays:
            self._warn(_STRAY, shorten(strays), "They count in this update as they are")

    def _warn(self, text: str, *details: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *details)
