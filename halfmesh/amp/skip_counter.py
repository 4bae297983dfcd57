"""Updates with inf or nan: how many were skipped, and when there are too many in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import NonFiniteError
from .grad_norm import Grads, GradStats, first_nonfinite
from .loss_scaler import LossScaler
from .step_result import HostCopy, is_captured

_BEFORE_LIMIT = 3
"""So many updates before the limit a run nears it: on a GPU the host knows that one update later."""


class SkipCounter:
    """Counts updates with inf or nan on the device, and ends a run that has `limit` of them in a row.

    The host reads the count only when `limit` may be near. On a GPU it reads a copy that was started one
    update before, so that nothing waits; the run then ends one update later, on all ranks the same.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self._near = max(1, limit - _BEFORE_LIMIT)
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        self._in_a_row, self._skipped = self._counts.unbind()
        self._known = 0  # in a row, when the host read the count
        self._at_most = 0  # in a row now, as far as the host knows
        self._unmeasured = 0  # updates since one was measured
        self._late = device.type == "cuda"
        self._copy: HostCopy | None = None  # of the count at the last update

    @property
    def nears_limit(self) -> bool:
        """Whether some more updates with inf or nan end the run, as far as the host knows; the same on all ranks."""
        return self._known >= self._near

    @property
    def skipped(self) -> int:
        """Updates skipped so far (reads the host)."""
        return int(self._skipped.item())

    def due_for_check(self) -> bool:
        """Whether an update that nothing else measures should be measured: one in `limit`, and all once inf or nan was
        found. (An update that is taken with nan leaves nan in the weights, so it is found a little later as well.)"""
        self._read_previous()
        self._unmeasured += 1
        return self._known > 0 or self._unmeasured >= self.limit

    def record(
        self, stats: GradStats, grads: Grads, skips: bool, raise_now: bool, scalers: Sequence[LossScaler]
    ) -> None:
        """Count one update.

        Args:
            skips: it is skipped if it has inf or nan.
            raise_now: inf or nan end the run (reads the host).

        Raises:
            NonFiniteError: they do, or `limit` was reached.
        """
        (self._counts if skips else self._in_a_row).add_(stats.found_inf)
        self._in_a_row.mul_(stats.found_inf)
        self._at_most += 1
        if self._late and is_captured(stats.found_inf.device):
            return
        if raise_now and bool(stats.found_inf):
            raise NonFiniteError("gradients hold inf or nan" + _explain(grads, scalers))
        self._read_previous()
        if self._unmeasured or self._at_most >= self._near:
            self._unmeasured = 0
            self._copy = HostCopy([self._in_a_row.clone()])
            if not self._late:
                self._read_previous()
        if self._known >= self.limit:
            raise NonFiniteError(
                f"{self._known} updates in a row had gradients with inf or nan (max_consecutive_skips="
                f"{self.limit})" + _explain(grads, scalers)
            )

    def _read_previous(self) -> None:
        if self._copy is not None and not is_captured(self._counts.device):
            self._known, self._copy = round(self._copy.read()[0]), None
            self._at_most = self._known + self._late

    def state_dict(self) -> dict[str, Any]:
        """The counters, as Python numbers."""
        return {"in_a_row": int(self._in_a_row.item()), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting where `state_dict` was taken."""
        self._in_a_row.fill_(state["in_a_row"])
        self._skipped.fill_(state["skipped"])
        self._at_most = self._known = state["in_a_row"]
        self._copy = None


def _explain(grads: Grads, scalers: Sequence[LossScaler]) -> str:
    """Where inf or nan is, what the loss scale has come to, and what to do."""
    name = first_nonfinite(grads)
    where = f"; the first parameter with a non-finite gradient is {name!r}"
    if not name:
        where = "; none on this rank (or gradients so large, above 1e19, that the sum of their squares is inf)"
    return (
        f"{where}{_explain_scale(scalers)}. Look for inf or nan in the batch, the loss and the weights; otherwise "
        "lower the learning rate, clip with clip_grad_norm, or use bf16. on_nonfinite='raise' stops at the first one"
    )


def _explain_scale(scalers: Sequence[LossScaler]) -> str:
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
