"""Warns of gradients that user code has made or changed, where an update would use them wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from ..errors import InputError, shorten
from ..utils.log import get_logger
from ..utils.param_shard import ParamShard
from ..utils.torch_private import grad_hooks, versions
from .master_weights import MasterWeights
from .step_result import is_captured

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

_VANISHED = (
    "the gradients that engine.backward left for this update are gone: zero_grad() of the model or the optimizer was "
    "called before the step. Call engine.zero_grad() (or that of the optimizer which convert_to_amp returned): within "
    "an accumulation cycle it does nothing, and outside it drops the batch"
)

_HOOKED = (
    "hooks on %s run in backward, where gradients are multiplied by the loss scale: a clamp, clip or noise in a "
    "hook has another effect than in fp32, and a norm is too large by the scale. Use bf16, which has no loss scale; "
    "clip with clip_grad_norm in the config; or multiply the bounds (or the noise) in the hook by engine.loss_scale"
)

_LOOKS = 3
"""Updates with finite gradients in which writes through `grad.data` are seen, which torch does not count."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_Noted = tuple[Sequence[ParamShard], Sequence[ParamShard], list[torch.Tensor | None], list[tuple[int, int]]]
_NOTHING: _Noted = ((), (), [], [])


class GradientWatch:
    """Remembers which gradients the last backward left, and their versions. Warns once of each kind of mistake.

    Attributes:
        hooked: a model to search for gradient hooks at the first backward; None: no search, or it is done.
        why: the reason why gradients must not change between backward and step, for the warning; None: they may.
    """

    def __init__(self, master_weights: MasterWeights, is_scaled: bool) -> None:
        self._master_weights = master_weights
        self.why = SCALED if is_scaled else None
        self._is_scaled = is_scaled
        self.hooked: nn.Module | None = None
        self._looks = _LOOKS
        self._warned: set[str] = set()
        self._noted: _Noted = _NOTHING
        self._has_gradients = False

    def forget(self) -> None:
        """Forget the gradients: they were used or cleared."""
        self._noted, self._has_gradients = _NOTHING, False

    def note(self) -> None:
        """After a backward, and the reduction if it was the last: remember the gradients, for `check`."""
        masters = self._master_weights
        self._has_gradients = any(shard.param.grad is not None for shard in masters.receivers)
        if self.why is None and masters.receivers == masters.trained:
            return  # as in a loop by hand, where gradients may be changed, and no shards of them are kept elsewhere
        grads = [shard.param.grad for shard in masters.receivers]
        self._noted = masters.trained, masters.receivers, grads, self._stamps(grads)

    def check(self, divisor: float | torch.Tensor | None = None) -> None:
        """Warn of gradients that were changed since `note`, and take shards of them again.

        Args:
            divisor: the step that follows divides them by it, besides the loss scale; None: a backward follows.

        Raises:
            InputError: all of them are gone.
        """
        if self._has_gradients and all(shard.param.grad is None for shard in self._master_weights.receivers):
            raise InputError(_VANISHED)
        self._has_gradients = False
        trained, receivers, before, old_stamps = self._noted
        if not receivers:
            return
        self._noted = _NOTHING
        now = [shard.param.grad for shard in receivers]
        stamps = self._stamps(now)
        if self._looks and self.why is not None and divisor is not None:
            self._looks -= all(bool(numbers.isfinite().all()) for numbers in map(_numbers, now) if numbers is not None)
        if stamps == old_stamps and all(map(is_, now, before)):
            return
        names = []
        for shard, old, new, old_stamp, stamp in zip(trained, before, now, old_stamps, stamps, strict=True):
            if new is old and stamp == old_stamp:
                continue
            if new is not None:
                names.append(shard.name)
            is_reduced = shard.param.grad is not None or old is None  # else the written gradient is still to be summed
            if shard.source is not None and is_reduced and (new is not old or stamp[0] != old_stamp[0]):
                shard.rebind_grad()
        is_divided = isinstance(divisor, torch.Tensor) or divisor not in (None, 1)
        if names and self.why is not None and (self.why is not UNDIVIDED or is_divided):
            self._warn(_CHANGED, shorten(names), self.why)

    def _stamps(self, grads: Sequence[torch.Tensor | None]) -> list[tuple[int, int]]:
        """The versions of `grads` and, in the first updates, sums of their bits (which the host waits for)."""
        looks = self._looks and self.why is not None
        return list(zip(versions(grads), [_sum_bits(grad) if looks else 0 for grad in grads], strict=True))

    def check_hooks(self) -> None:
        """Before a backward: warn of hooks of the user's, in the first one that is scaled."""
        model, self.hooked = self.hooked, None
        if model is None:
            return
        named = [*model.named_parameters(), *((name or "the model", module) for name, module in model.named_modules())]
        names = [name for name, given in named if any(map(_is_of_user, grad_hooks(given)))]
        if names:
            self._warn(_HOOKED, shorten(names))

    def check_empty(self) -> None:
        """Before the first backward of an update.

        Raises:
            InputError: there are gradients of another backward, which the update would divide by the loss scale.
        """
        strays = [shard.name for shard in self._master_weights.receivers if shard.param.grad is not None]
        if strays and self._is_scaled:
            raise InputError(_STRAY % (shorten(strays), "The update would divide them by the loss scale"))
        if strays:
            self._warn(_STRAY, shorten(strays), "They count in this update as they are")

    def _warn(self, text: str, *details: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *details, ranks=None if self.why is SHARDED else (0,))  # as ranks hold other parameters


def _numbers(grad: Any) -> torch.Tensor | None:
    """This rank's numbers of `grad`; None if the host cannot read them now, or must not (placeholders)."""
    own = grad.to_local() if hasattr(grad, "to_local") else grad
    is_plain = type(own) is torch.Tensor and own.layout is torch.strided and own.is_floating_point()
    return own.detach() if is_plain and not is_captured(own.device) else None


def _sum_bits(grad: torch.Tensor | None) -> int:
    """The sum of a gradient's elements, each taken for an integer: of inf and nan, too, and without rounding."""
    numbers = _numbers(grad)
    return 0 if numbers is None else int(numbers.view(_BITS[numbers.itemsize]).sum(dtype=torch.int64))


def _is_of_user(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith(("halfmesh.", "torch.distributed."))
