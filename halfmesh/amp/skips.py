"""Counts updates with non-finite gradients on the device, and stops a run that has nothing but those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import NonFiniteError
from .collected import Gradients
from .host_copy import HostCopy, is_captured
from .loss_scaler import LossScaler
from .verdict import Verdict, first_nonfinite


class SkipWatch:
    """Counts non-finite verdicts, and looks at the count only when `limit` in a row may have been reached.

    On a GPU the count is on its way to the host for one update, so that nothing waits for it; a run is stopped one
    update later there, on all ranks the same.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self._counters = torch.zeros(2, dtype=torch.float64, device=device)  # one operation counts both
        self._in_a_row, self._skipped = self._counters.unbind()
        self._most = 0  # no more than this many in a row, as far as the host knows
        self._unmeasured = 0
        self._known = 0  # so many in a row it was when the host looked last
        self._late = device.type == "cuda"
        self._asked: HostCopy | None = None  # the count as it was at the update before this one

    def wants_a_look(self) -> bool:
        """Whether an update that nothing else measures should be measured: one in `limit`, all once inf or nan is met.

        What steps in spite of inf or nan leaves nan in the weights, so that it is found a little later as well.
        """
        if self._asked is not None:
            self._take_answer(self._asked)
        self._unmeasured += 1
        return self._known > 0 or self._unmeasured >= self.limit

    @property
    def skipped(self) -> int:
        """Updates skipped so far (reads the host)."""
        return int(self._skipped.item())

    def judge(
        self,
        verdict: Verdict,
        grads: Gradients,
        skips: bool,
        raise_now: bool,
        scalers: Sequence[LossScaler],
    ) -> None:
        """Count one verdict. `skips`: the update is skipped if non-finite; `raise_now`: it ends the run instead."""
        found = verdict.found_inf
        (self._counters if skips else self._in_a_row).add_(found)
        self._in_a_row.mul_(found)
        self._most += 1
        if self._late and is_captured(found.device):
            return
        if raise_now and bool(found):
            raise NonFiniteError("gradients hold inf or nan" + _where(grads) + _scale_words(scalers) + _ADVICE)
        if self._asked is not None:
            self._take_answer(self._asked)
        if self._unmeasured or self._most >= self.limit:
            self._ask()
        if self._known >= self.limit:
            raise NonFiniteError(
                f"{self._known} updates in a row had gradients with inf or nan (max_consecutive_skips="
                f"{self.limit})" + _where(grads) + _scale_words(scalers) + _ADVICE
            )

    def _ask(self) -> None:
        """Have the count sent to the host."""
        self._unmeasured = 0
        if self._late:
            self._asked = HostCopy([self._in_a_row.clone()])
        else:
            self._most = self._known = round(self._counters.tolist()[0])

    def _take_answer(self, asked: HostCopy) -> None:
        if not is_captured(self._counters.device):
            self._known, self._asked = round(asked.read()[0]), None
            self._most = self._known + 1

    def state_dict(self) -> dict[str, Any]:
        """The counters, as Python numbers."""
        return {"in_a_row": int(self._in_a_row.item()), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting where `state_dict` was taken."""
        self._in_a_row.fill_(state["in_a_row"])
        self._skipped.fill_(state["skipped"])
        self._most = self._known = state["in_a_row"]
        self._asked = None


_ADVICE = (
    ". Look for inf or nan in the batch, the loss and the weights; otherwise lower the learning rate, clip with "
    "clip_grad_norm, or use bf16. on_nonfinite='raise' stops at the first one"
)


def _where(grads: Gradients) -> str:
    name = first_nonfinite(grads)
    if name:
        return f"; the first parameter with a non-finite gradient is {name!r}"
    return "; none on this rank (or gradients so large, above 1e19, that the sum of their squares is inf)"


def _scale_words(scalers: Sequence[LossScaler]) -> str:
    if not scalers:
        return "; no loss scaling is in use"
    if len(scalers) > 1:
        return f"; the loss scales have come to {', '.join(f'{scaler.scale.item():g}' for scaler in scalers)}"
    scale, options = scalers[0].scale.item(), scalers[0].options
    if not options.dynamic:
        return f"; the loss scale is static at {scale:g}"
    if scale <= options.min_scale:
        return f"; the loss scale has reached its floor, {options.min_scale:g}"
    return f"; the loss scale {'has fallen to' if scale < options.initial else 'is'} {scale:g}"
