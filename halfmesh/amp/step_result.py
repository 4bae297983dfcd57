"""The result of an update and the count of skipped updates, which the host reads without blocking the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import optim

from ..errors import NonFiniteError
from ..utils.log import get_logger
from ..utils.param_shard import Ranks
from .grad_norm import Grads, GradStats, first_nonfinite
from .recipe import Recipe, UpdateOptions

_log = get_logger(__name__)

# `nears_limit` is true this many updates before the limit: on a GPU the host reads the count one update later.
_BEFORE_LIMIT = 3
# The host checks the updates that were taken for inf and nan at least once in this many updates.
_LOOK_EVERY = 10

_TOLD = (
    "%sthe loss or the gradient norm was inf or nan in %d consecutive updates, which were not skipped "
    "(on_nonfinite='auto'): the weights may be inf or nan now. The run ends after %d such updates in a row "
    "(max_consecutive_skips); on_nonfinite='raise' ends it at the first, and debug='nonfinite' names the module"
)


class StepResult:
    """The result of one update, as `engine.step` returns it. Its attributes are plain Python numbers.

    halfmesh reads the numbers from the device when you first use one of them. This needs no communication, so one rank
    may do it alone. On a GPU the update starts a non-blocking copy to host memory, and reading waits for that copy.
    """

    def __init__(self, optimizer: optim.Optimizer, **numbers: torch.Tensor | None) -> None:
        """Start to copy the numbers to the host.

        Args:
            optimizer: the first parameter group gives `lr`.
            numbers: 0-dim tensors that nothing writes any more: `skipped`, `norm` (of the gradients before division),
                `divisor` (of the gradients), `scale` and `num_zeros`, each only if it is known.
        """
        lr = optimizer.param_groups[0].get("lr", math.nan)  # a third party's optimizer may have none
        self._lr: float | torch.Tensor = lr.clone() if isinstance(lr, torch.Tensor) else lr
        known = {name: number for name, number in numbers.items() if number is not None}
        self._copy = HostCopy(list(known.values()))
        self._values: dict[str, float | None] = dict.fromkeys(known)  # None: not read yet

    def _get(self, name: str) -> float | None:
        if None in self._values.values():
            self._values = dict(zip(self._values, self._copy.read(), strict=True))
        return self._values.get(name)

    @property
    def skipped(self) -> bool:
        """True if halfmesh skipped the update because a gradient on any rank was inf or nan."""
        return bool(self._get("skipped"))

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients over all ranks, unscaled and before clipping. None if it was not measured."""
        norm = self._get("norm")
        divisor = None if norm is None else self._get("divisor")
        return norm if norm is None or divisor is None else norm / divisor

    @property
    def loss_scale(self) -> float:
        """The loss scale of this step's backward, for `loss_id=0`. 1.0 without loss scaling."""
        scale = self._get("scale")
        return 1.0 if scale is None else scale

    @property
    def num_zeros(self) -> int | None:
        """The number of gradient elements that are exactly zero, over all ranks. None if they were not counted."""
        zeros = self._get("num_zeros")
        return None if zeros is None else round(zeros)

    @property
    def lr(self) -> float:
        """The learning rate that the first parameter group used. nan if the optimizer has no `lr`."""
        return float(self._lr)

    def __repr__(self) -> str:
        return (
            f"StepResult(skipped={self.skipped}, grad_norm={self.grad_norm}, loss_scale={self.loss_scale:g}, "
            f"lr={self.lr:g}, num_zeros={self.num_zeros})"
        )


class SkipCounter:
    """Counts updates with inf or nan on the device, and ends a run that has `limit` of them in a row.

    The host reads the count only when `limit` may be near. Where such updates are taken, it also reads it from time to
    time, to warn. On a GPU it reads a copy that was started earlier, so that nothing waits. The run then ends one
    update later, at the same update on all ranks.

    If nothing else needs a norm, only one update in `limit` is measured. The updates before it count by the losses of
    all ranks.

    Attributes:
        wider: advice to compute in a wider format, or "".
    """

    def __init__(self, options: UpdateOptions, recipe: Recipe, device: torch.device, ranks: Ranks) -> None:
        self.limit = options.max_consecutive_skips
        self.wider = "use bf16" if recipe.compute_dtype == torch.float16 else ""
        self._skips = options.skips_nonfinite(recipe)
        self._raises = options.on_nonfinite == "raise"
        self._samples = not (options.max_norm > 0 or options.needs_grad_norm(recipe))
        self._last_rank = ranks.size - 1  # it has losses if rank 0, a pipeline's first stage, has none
        self._prefix = "" if options.name is None else f"{options.name}: "
        self._has_told = False
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        self._in_a_row, self._skipped = self._counts.unbind()
        self._known = 0  # in a row, when the host read the count
        self._measured = 0
        self._loss: torch.Tensor | None = None  # of this update
        self._losses: list[torch.Tensor | None] = []  # of the updates since one was measured
        self._late = device.type == "cuda"
        self._count: HostCopy | None = None  # at the last update
        self._newest_losses: HostCopy | None = None

    @property
    def nears_limit(self) -> bool:
        """True if a few more updates with inf or nan end the run, as far as the host knows. Equal on all ranks."""
        return self._known >= self._near

    @property
    def _near(self) -> int:
        return max(1, self.limit - _BEFORE_LIMIT)

    @property
    def taken_in_a_row(self) -> int:
        """The number of newest updates with inf or nan that were taken, as the host knows. Equal on all ranks."""
        return 0 if self._skips or not self._known else self._known + self._late

    @property
    def skipped(self) -> int:
        """The number of updates skipped so far. Waits for the device."""
        return int(self._skipped.item())

    def see(self, loss: torch.Tensor) -> None:
        """Record the loss of a microbatch, before its backward."""
        if self._samples and _can_be_read(loss):
            value = loss.detach() if loss.ndim == 0 else loss.detach().reshape(())
            self._loss = value if self._loss is None else self._loss + value

    def forget(self) -> None:
        """Forget the losses of this update."""
        self._loss = None

    def due_for_check(self) -> bool:
        """Return True if an update should be measured only to count it: one in `limit`, and all once inf or nan was
        found. (An update that is taken with nan leaves nan in the weights, so a later check also finds it.)"""
        self._read_previous()
        if self._known > 0 or len(self._losses) + 1 >= self.limit:
            return True
        self._losses.append(self._loss)
        if self._late and is_captured(self._counts.device):
            return False
        if self._is_time(len(self._losses)):
            self._newest_losses = HostCopy([loss for loss in self._losses[-_LOOK_EVERY:] if loss is not None])
        if self._newest_losses is not None and self._newest_losses.arrived:
            newest_first = reversed(self._newest_losses.read())
            self._newest_losses = None
            self._warn(len(list(takewhile(lambda loss: not math.isfinite(loss), newest_first))), self._last_rank)
        return False

    def flags(self) -> torch.Tensor | None:
        """For each update since one was measured, 1 if its loss was inf or nan on this rank, else 0 (float64)."""
        if not self._losses:
            return None
        fine = torch.zeros_like(self._in_a_row)
        losses = [fine if loss is None else loss.to(fine.device) for loss in self._losses]
        return torch.stack(losses).isfinite().logical_not().to(fine)

    def record(self, stats: GradStats, grads: Grads, scale: Callable[[], str]) -> None:
        """Count one update that was measured, and those before it that were not.

        Args:
            stats: the statistics of the gradients, with the `flags` of all ranks.
            grads: the gradients, to name a parameter in the error.
            scale: the state of the loss scale in words, for the error.

        Raises:
            NonFiniteError: inf or nan under on_nonfinite="raise" (the host waits for the device), or `limit` was
                reached.
        """
        if self._losses and stats.flags is not None:
            bad = torch.cat([stats.flags.sign(), stats.found_inf.double().unsqueeze(0)])
            self._in_a_row.mul_(bad.prod()).add_(bad.flip(0).cumprod(0).sum())
        else:
            (self._counts if self._skips else self._in_a_row).add_(stats.found_inf)
            self._in_a_row.mul_(stats.found_inf)
        sampled, self._losses = bool(self._losses), []
        self._measured += 1
        if self._late and is_captured(stats.found_inf.device):
            return
        if self._raises and bool(stats.found_inf):
            raise NonFiniteError("gradients hold inf or nan" + self._explain(grads, scale()))
        self._read_previous()
        is_time = self._is_time(self._measured) and _can_be_read(stats.norm)
        if sampled or self._known or is_time or self._measured % self._near == 0:
            self._count = HostCopy([self._in_a_row.clone()])
            if not self._late:
                self._read_previous()
        if self._known >= self.limit:
            raise NonFiniteError(
                f"{self._known} updates in a row had inf or nan in their gradients "
                f"(max_consecutive_skips={self.limit})" + self._explain(grads, scale())
            )

    def _is_time(self, updates: int) -> bool:
        """Return True if the host checks for inf and nan after this number of updates, to warn."""
        return not self._skips and (updates in (1, 2, 4, 8) or updates % _LOOK_EVERY == 0)

    def _read_previous(self) -> None:
        if self._count is not None and not is_captured(self._counts.device):
            self._known, self._count = round(self._count.read()[0]), None
            self._warn(self._known)

    def _warn(self, in_a_row: int, *more_ranks: int) -> None:
        if in_a_row and not (self._skips or self._has_told):
            self._has_told = True
            _log.warning(_TOLD, self._prefix, in_a_row, self.limit, ranks=(0, *more_ranks))

    def state_dict(self) -> dict[str, Any]:
        """The counters, as Python numbers."""
        return {"in_a_row": int(self._in_a_row.item()), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._in_a_row.fill_(state["in_a_row"])
        self._skipped.fill_(state["skipped"])
        self._known = state["in_a_row"]
        self._count = self._loss = self._newest_losses = None
        self._losses = []

    def _explain(self, grads: Grads, scale: str) -> str:
        """Explain where inf or nan is, the loss scale, and what to do."""
        name = first_nonfinite(grads)
        where = f"the first parameter with a non-finite gradient is {name!r}" if name else "none on this rank"
        wider = f", or {self.wider}" if self.wider else ""
        return (
            f"; {where}; {scale}. Look for inf or nan in the batch, the loss and the weights; otherwise lower the "
            f"learning rate, clip with clip_grad_norm{wider}. on_nonfinite='raise' stops at the first one"
        )


def _can_be_read(value: torch.Tensor) -> bool:
    """Return True if the host can read it: it has memory, is not a DTensor, and no CUDA graph is being captured."""
    return type(value) is torch.Tensor and not is_captured(value.device)


class HostCopy:
    """Copies of 0-dim tensors in host memory. On a GPU the copies start now and block nothing.

    Elsewhere, and while a CUDA graph is captured, the tensors themselves are kept: they must not be written any more
    (of a graph they are the memory that each replay writes).
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._ready: torch.cuda.Event | None = None
        self._values = values
        if values and values[0].is_cuda and not is_captured(values[0].device):
            joined = _join(values)
            copied = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            copied.copy_(joined, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(values[0].device))
            self._values = list(copied.unbind())

    @property
    def arrived(self) -> bool:
        """True if `read` would not wait. (Ranks may differ in this: no collective may depend on it.)"""
        return self._ready is None or self._ready.query()

    def read(self) -> list[float]:
        """The values; waits for them."""
        if self._ready is not None and not self._ready.query():
            self._ready.synchronize()
        return _join(self._values).tolist() if self._values else []


def _join(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 0-dim `values`, of any floating-point dtypes, in float64 [n]. (`stack` promotes: no launch for each.)"""
    return torch.stack(list(values)).double()


def is_captured(device: torch.device) -> bool:
    """Return True in the capture of a CUDA graph: the host cannot read then, and host code does not run in a replay."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # it need not be the current one
        return torch.cuda.is_current_stream_capturing()
