"""Updates with inf or nan: how many were skipped, and when there are too many in a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import NonFiniteError
from ..shard import Ranks
from .grad_norm import Grads, GradStats, first_nonfinite
from .loss_scaler import LossScaler
from .step_result import HostCopy, is_captured

_LOOK_EVERY = 10
"""After so many updates, and after the 1st, 2nd, 4th and 8th, the host looks at their losses or norms."""
_BEFORE_LIMIT = 3
"""So many updates before the limit a run nears it: on a GPU the host knows that one update later."""


class SkipCounter:
    """Counts updates with inf or nan on the device, and ends a run that has `limit` of them in a row.

    The host reads the count only when `limit` may be near. On a GPU it reads a copy that was started one
    update before, so that nothing waits; the run then ends one update later, on all ranks the same.

    Updates that are not skipped ruin the weights. Of these this rank's losses (or the norm, where it is measured) are
    copied to the host, and looked at now and then when they have arrived.

    Args:
        ranks: that take updates together.
        skips: updates with inf or nan are skipped.
        wider: advice to compute in a wider format; "" if there is none.
    """

    def __init__(self, limit: int, device: torch.device, ranks: Ranks, skips: bool, wider: str = "") -> None:
        self.limit = limit
        self._ranks = ranks
        self._skips = skips
        self.wider = wider
        self._updates = 0
        self._bad_since: int | None = None  # the first of the newest updates in a row with inf or nan on this rank
        self._loss: torch.Tensor | None = None  # of this update
        self._values: list[tuple[int, torch.Tensor]] = []  # by update, since the last look
        self._looks: list[tuple[list[int], HostCopy]] = []
        self._near = max(1, limit - _BEFORE_LIMIT)
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        self._in_a_row, self._skipped = self._counts.unbind()
        self._known = 0  # in a row, when the host read the count
        self._at_most = 0  # in a row now, as far as the host knows
        self._unmeasured = 0  # updates since one was measured
        self._samples = False  # updates before the one of `_copy` were not measured
        self._late = device.type == "cuda"
        self._copy: HostCopy | None = None  # of the count at the last update

    @property
    def nears_limit(self) -> bool:
        """Whether some more updates with inf or nan end the run, as far as the host knows; the same on all ranks."""
        return self._known >= self._near

    @property
    def in_a_row(self) -> int:
        """The newest updates in a row with inf or nan, as far as this rank knows. (Ranks may differ in this.)"""
        seen = 0 if self._bad_since is None else self._updates - self._bad_since + 1
        return max(seen, self._known)

    def see(self, loss: torch.Tensor) -> None:
        """The loss of a microbatch, from which backward runs."""
        if not self._skips and _can_be_read(loss):
            value = loss.detach() if loss.ndim == 0 else loss.detach().reshape(())
            self._loss = value if self._loss is None else self._loss + value

    def forget(self) -> None:
        """The losses of this update count no more."""
        self._loss = None

    def end_update(self, norm: torch.Tensor | None) -> None:
        """Look at this update and those before it, if it is time; `norm`, if it was measured, counts for the loss.

        Not at all if updates are skipped.
        """
        value = self._loss if norm is None else norm
        self._updates += 1
        if self._skips or value is None or not _can_be_read(value):
            return
        if self._values:
            value = value.to(self._values[0][1].device, non_blocking=True)
        self._values.append((self._updates, value))
        if self._updates % _LOOK_EVERY == 0 or self._updates in (1, 2, 4, 8):
            self._start_look()
        self._finish_looks(waits=False)

    def _start_look(self) -> None:
        if self._values:
            updates, values = zip(*self._values, strict=True)
            self._looks.append((list(updates), HostCopy(values)))
            self._values = []

    def _finish_looks(self, waits: bool) -> None:
        while self._looks and (waits or self._looks[0][1].arrived):
            updates, copy = self._looks.pop(0)
            for update, value in zip(updates, copy.read(), strict=True):
                is_new = self._bad_since is None
                self._bad_since = None if math.isfinite(value) else update if is_new else self._bad_since

    def _add_unmeasured(self) -> None:
        """The first measured update with inf or nan: count those before it, in which some rank's loss had it. All ranks
        together."""
        self._start_look()
        self._finish_looks(waits=True)
        rows = torch.zeros(self._ranks.size, dtype=torch.float64, device=self._counts.device)
        rows[self._ranks.rank] = self.in_a_row
        if self._ranks.size > 1:
            self._ranks.all_reduce(rows)
        before = round(rows.max().item()) - self._known
        if before > 0:
            self._known += before
            self._in_a_row.add_(self._in_a_row.sign() * before)

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

    def record(self, stats: GradStats, grads: Grads, raise_now: bool, scalers: Sequence[LossScaler]) -> None:
        """Count one update.

        Args:
            raise_now: inf or nan end the run (reads the host).

        Raises:
            NonFiniteError: they do, or `limit` was reached.
        """
        (self._counts if self._skips else self._in_a_row).add_(stats.found_inf)
        self._in_a_row.mul_(stats.found_inf)
        self._at_most += 1
        if self._late and is_captured(stats.found_inf.device):
            return
        if raise_now and bool(stats.found_inf):
            raise NonFiniteError("gradients hold inf or nan" + self._explain(grads, scalers))
        self._read_previous()
        if self._unmeasured or self._at_most >= self._near:
            self._samples, self._unmeasured = self._unmeasured > 0, 0
            self._copy = HostCopy([self._in_a_row.clone()])
            if not self._late:
                self._read_previous()
        if self._known >= self.limit:
            raise NonFiniteError(
                f"{self._known} updates in a row had gradients with inf or nan (max_consecutive_skips="
                f"{self.limit})" + self._explain(grads, scalers)
            )

    def _read_previous(self) -> None:
        if self._copy is not None and not is_captured(self._counts.device):
            was_known, self._known, self._copy = self._known, round(self._copy.read()[0]), None
            if self._known and not was_known and self._samples:
                self._add_unmeasured()
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
        self._loss, self._bad_since, self._values, self._looks = None, None, [], []

    def _explain(self, grads: Grads, scalers: Sequence[LossScaler]) -> str:
        """Where inf or nan is, what the loss scale has come to, and what to do."""
        name = first_nonfinite(grads)
        where = f"; the first parameter with a non-finite gradient is {name!r}"
        if not name:
            where = "; none on this rank (or gradients so large, above 1e19, that the sum of their squares is inf)"
        ways = ["lower the learning rate", "clip with clip_grad_norm", *([self.wider] if self.wider else ())]
        return (
            f"{where}{_explain_scale(scalers)}. Look for inf or nan in the batch, the loss and the weights; otherwise "
            f"{', '.join(ways[:-1])}{',' * (len(ways) > 2)} or {ways[-1]}. on_nonfinite='raise' stops at the first one"
        )


def _can_be_read(value: torch.Tensor) -> bool:
    """Whether the host can read it: it has memory and is no DTensor, and no CUDA graph is captured."""
    return type(value) is torch.Tensor and not is_captured(value.device)


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
