"""What the host gets to know of an update, without holding up the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import optim

from ..errors import NonFiniteError
from .grad_norm import Grads, GradStats, first_nonfinite
from .loss_scaler import LossScaler


class StepResult:
    """What one update did. Attributes are read from the device when first asked for, locally: no communication.

    On a GPU the numbers are already on their way: a copy to host memory is started with the update and does not
    hold it up.
    """

    def __init__(self, optimizer: optim.Optimizer, **numbers: torch.Tensor | None) -> None:
        """Of `numbers`, 0-dim tensors that nobody writes any more, those that are known: `skipped`, `norm` (of the
        gradients as they were), `divisor` (of these), `scale`, `num_zeros`."""
        lr = optimizer.param_groups[0].get("lr", math.nan)  # a third party's optimizer may have none
        self._lr: float | torch.Tensor = lr.clone() if isinstance(lr, torch.Tensor) else lr
        known = {name: number for name, number in numbers.items() if number is not None}
        self._names = list(known)
        self._copy = HostCopy(list(known.values()))
        self._values: dict[str, float] | None = None

    def _get(self, name: str) -> float | None:
        if self._values is None and name in self._names:
            self._values = dict(zip(self._names, self._copy.read(), strict=True))
        return (self._values or {}).get(name)

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because a gradient on some rank was inf or nan."""
        return bool(self._get("skipped"))

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradients over all ranks, unscaled and before clipping; None if nothing asked for it."""
        norm = self._get("norm")
        divisor = None if norm is None else self._get("divisor")
        return norm if norm is None or divisor is None else norm / divisor

    @property
    def loss_scale(self) -> float:
        """The loss scale of this step's backward (of loss_id 0); 1.0 without loss scaling."""
        scale = self._get("scale")
        return 1.0 if scale is None else scale

    @property
    def num_zeros(self) -> int | None:
        """Number of gradient elements that are exactly zero, over all ranks; None unless asked for."""
        zeros = self._get("num_zeros")
        return None if zeros is None else round(zeros)

    @property
    def lr(self) -> float:
        """The learning rate used, of the first parameter group."""
        return float(self._lr)

    def __repr__(self) -> str:
        return (
            f"StepResult(skipped={self.skipped}, grad_norm={self.grad_norm}, loss_scale={self.loss_scale:g}, "
            f"lr={self.lr:g}, num_zeros={self.num_zeros})"
        )


class HostCopy:
    """Copies of 0-dim tensors in host memory. On a GPU they are started now and do not hold anything up.

    Elsewhere, and while a CUDA graph is captured, the tensors themselves are kept: they must not be written any more
    (of a graph they are the memory that each replay writes).
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._ready: torch.cuda.Event | None = None
        self._values = values
        if values and values[0].is_cuda and not is_captured(values[0].device):
            joined = torch.stack([value.double() for value in values])
            copied = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            copied.copy_(joined, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(values[0].device))
            self._values = list(copied.unbind())

    @property
    def arrived(self) -> bool:
        """Whether `read` would not wait. (Ranks may differ in this: nothing that they share may depend on it.)"""
        return self._ready is None or self._ready.query()

    def read(self) -> list[float]:
        """The values; waits for them."""
        if self._ready is not None:
            self._ready.synchronize()
        return torch.stack([value.double() for value in self._values]).tolist() if self._values else []


class SkipCounter:
    """Counts updates with inf or nan on the device, and ends a run that has `limit` of them in a row.

    The host reads the count only when `limit` may have been reached. On a GPU it reads a copy that was started one
    update before, so that nothing waits; the run then ends one update later, on all ranks the same.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        self._in_a_row, self._skipped = self._counts.unbind()
        self._known = 0  # in a row, when the host read the count
        self._at_most = 0  # in a row now, as far as the host knows
        self._unmeasured = 0  # updates since one was measured
        self._late = device.type == "cuda"
        self._copy: HostCopy | None = None  # of the count at the last update

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
        if is_captured(stats.found_inf.device):
            return
        if raise_now and bool(stats.found_inf):
            raise NonFiniteError("gradients hold inf or nan" + _explain(grads, scalers))
        self._read_previous()
        if self._unmeasured or self._at_most >= self.limit:
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


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is made of what runs now: then the host can read nothing, and does nothing in a replay."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # it need not be the current one
        return torch.cuda.is_current_stream_capturing()


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
