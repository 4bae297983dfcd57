"""Learning rates: advances the scheduler; Colossal-AI's warm-up schedulers, as closed formulas of the step.

A schedule with a warm-up gives each parameter group's rate as a function of its base rate `lr` and of the step `s`,
counted from 0 in calls of `scheduler.step()`. Groups keep their ratio, and resuming needs `s` only. After `total_steps`
the last value stays.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingWarmRestarts, LRScheduler

from ..amp.step_result import StepResult
from ..errors import InputError, counted
from ..utils.tensors import parameter_names


def make_schedulers(given: Any, optimizers: Sequence[Optimizer], count_updates: Callable[[], int]) -> Any:
    """`given`, a scheduler or a list of them, with those made that were given as callables `optimizer -> scheduler`: of
    a list with the optimizer at the same place, of a single one one for each optimizer.

    Args:
        count_updates: gives the updates of an epoch, for callables that have a parameter `updates_per_epoch` without a
            default. (A default, as `functools.partial` gives it one, is the value that the user chose.)

    Raises:
        InputError: a list of another length that has callables.
    """

    def call(make: Any, optimizer: Any) -> Any:
        if not _makes_scheduler(make):
            return make
        asks = "updates_per_epoch" in parameter_names(make, needed=True)
        return make(optimizer, updates_per_epoch=count_updates()) if asks else make(optimizer)

    is_list = isinstance(given, (list, tuple))
    makers = list(given) if is_list else [given]
    if any(map(_makes_scheduler, makers)):
        makers = makers if is_list else makers * len(optimizers)
        if len(makers) != len(optimizers):
            raise InputError(
                f"lr_scheduler: a list of {len(makers)} was given for {counted(len(optimizers), 'optimizer')}; pass "
                "one for each, in the same order (None to leave a learning rate unchanged), or one function for all"
            )
        makers = list(map(call, makers, optimizers))
    made = [scheduler for scheduler in makers if scheduler is not None] or None
    return made if made is None or is_list or len(made) > 1 else made[0]


def _makes_scheduler(given: Any) -> bool:
    return callable(given) and (isinstance(given, type) or not hasattr(given, "step"))


class LRAdvance:
    """Advances the user's schedulers for the engine.

    With interval "step" they advance unless the update was skipped. Reading that at once would make the host wait
    for the device, so `settle` reads it before the next update. If none can be skipped (not `may_skip`), they advance
    at once.

    Args:
        scheduler: anything with `step()`, or a list of such; or None.
    """

    def __init__(self, scheduler: Any, interval: Literal["step", "epoch", "manual"], may_skip: bool) -> None:
        self.scheduler = scheduler
        self.all = _as_list(scheduler)
        self._interval = interval
        self._may_skip = may_skip
        self._pending: StepResult | None = None
        self._positions: list[int | None] | None = None  # where the engine left them; None: before its first step

    def check(self) -> None:
        """Check the schedulers' positions, at each call of `engine.step`.

        Raises:
            InputError: the user has stepped one, too: it is one step ahead, or at any other step if it takes
                `step(epoch)`. (A load goes back, or ahead by more. Steps before the first call are allowed.)
        """
        before, self._positions = self._positions, list(map(_position, self.all))
        if self._interval == "manual" or before is None or self._positions == before:
            return
        for scheduler, left, now in zip(self.all, before, self._positions, strict=True):
            jumped = now != left and isinstance(scheduler, CosineAnnealingWarmRestarts)
            if left is not None and now is not None and (now == left + 1 or jumped):
                raise InputError(
                    f"lr_scheduler.step() was called outside the engine, which advances it (lr_interval="
                    f"{self._interval!r}): its last_epoch was {left} and is {now}; remove the call, or set "
                    "lr_interval='manual'"
                )

    def after(self, result: StepResult) -> None:
        """Advance, or note that `settle` has to, after an update that was taken or skipped."""
        if self._interval == "step":
            self._pending = result
            if not self._may_skip:
                self.settle()

    def settle(self) -> None:
        """Advance for the last update, if it was taken and has not been counted."""
        result, self._pending = self._pending, None
        if result is not None and not result.skipped:
            self._advance()

    def end_epoch(self) -> None:
        """Advance at the end of an epoch of the engine's dataloader, with interval "epoch"."""
        self.settle()
        if self.scheduler is not None and self._interval == "epoch":
            self._advance()

    def state_dict(self) -> Any:
        """The scheduler's state, or a list of several, after the last update."""
        self.settle()
        if isinstance(self.scheduler, list):
            return [scheduler.state_dict() for scheduler in self.all]
        return None if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict`."""
        self._pending = None
        if self.scheduler is not None and state is not None:
            for scheduler, own in zip(self.all, _as_list(state), strict=True):
                scheduler.load_state_dict(own)
            self._positions = None

    def replay(self, start: Any, saved: Any) -> None:
        """Begin at the state `start` again, and advance to where `saved`, the state of another run, is: all schedulers
        together, as they do in training."""
        starts, places = _as_list(start), list(map(_place, _as_list(saved)))
        places = places if len(places) == len(starts) else places[:1] * len(starts)
        left = [there - _place(own) for there, own in zip(places, starts, strict=True)]
        self.load_state_dict(start)
        with warnings.catch_warnings():  # no optimizer has stepped in this run, but in the other
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for step in range(max(left)):
                for scheduler, steps in zip(self.all, left, strict=True):
                    if step < steps:
                        scheduler.step()

    def _advance(self) -> None:
        self.check()
        for scheduler in self.all:
            scheduler.step()
        self._positions = list(map(_position, self.all))


def _as_list(state: Any) -> list[Any]:
    return state if isinstance(state, list) else [state]


def _place(state: Any) -> int:
    """The step of a scheduler's state."""
    while "last_epoch" not in state:  # of a ChainedScheduler
        state = state["_schedulers"][0]
    return int(state["last_epoch"])


def _position(scheduler: Any) -> int | None:
    while isinstance(scheduler, ChainedScheduler):  # it counts no steps itself
        scheduler = scheduler._schedulers[0]
    return getattr(scheduler, "last_epoch", None)


class _WarmupLR(LRScheduler):
    """`lr * (s + 1) / warmup_steps` for s < warmup_steps, then `_decayed`. The warm-up may be longer than `total_steps`
    (a short trial run): the rate then only rises.

    As in torch, `load_state_dict` also restores `total_steps` and the other arguments of the saved scheduler.
    """

    _extra_warmup_step = 0

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int, last_epoch: int) -> None:
        if total_steps < 1:
            raise InputError(f"total_steps={total_steps}: expected 1 or more, counted in optimizer steps, not epochs")
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)  # last: it sets the optimizer's learning rates

    def get_lr(self) -> list[Any]:
        """The learning rate of each parameter group at step `last_epoch`."""
        step, up = self.last_epoch, self.warmup_steps
        if step < up:
            return [lr * (step + 1) / (up + self._extra_warmup_step) for lr in self.base_lrs]
        progress = 1.0 if step >= self.total_steps else (step - up) / (self.total_steps - up)
        return [self._decayed(lr, progress) for lr in self.base_lrs]

    def _decayed(self, base_lr: Any, progress: float) -> Any:
        """The rate after the fraction `progress` of the decay."""
        raise NotImplementedError


class LinearWarmupLR(_WarmupLR):
    """Linear warm-up, then linear decay to 0 at `total_steps`.

    `lr * (s + 1) / (warmup_steps + 1)` for s < warmup_steps, else
    `lr * (total_steps - s) / (total_steps - warmup_steps)`.
    """

    _extra_warmup_step = 1

    def __init__(self, optimizer: Optimizer, warmup_steps: int, total_steps: int, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _decayed(self, base_lr: Any, progress: float) -> Any:
        left = max(0, self.total_steps - self.last_epoch)  # with 1 - progress the last bit would be another
        return base_lr * left / max(1, self.total_steps - self.warmup_steps)


class CosineAnnealingWarmupLR(_WarmupLR):
    """Linear warm-up, then half a cosine down to `eta_min` (a learning rate, the same for all groups).

    `lr * (s + 1) / warmup_steps` for s < warmup_steps, else, with
    p = (s - warmup_steps) / (total_steps - warmup_steps), `eta_min + (lr - eta_min) * (1 + cos(pi * p)) / 2`
    (Loshchilov and Hutter, 2017, "SGDR", equation 5, one cycle).
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        self.eta_min = float(eta_min)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _decayed(self, base_lr: Any, progress: float) -> Any:
        return self.eta_min + (base_lr - self.eta_min) * (1 + math.cos(math.pi * progress)) / 2


class MultiStepWarmupLR(_WarmupLR):
    """Linear warm-up, then the rate times `gamma` at each milestone.

    `lr * (s + 1) / warmup_steps` for s < warmup_steps, else `lr * gamma ** (number of milestones <= s)`. Milestones are
    steps from the start of training, warm-up included.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Iterable[int],
        warmup_steps: int = 0,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.gamma = float(gamma)
        self.milestones = sorted(milestones)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _decayed(self, base_lr: Any, progress: float) -> Any:
        return base_lr * self.gamma ** bisect_right(self.milestones, min(self.last_epoch, self.total_steps))


class PolynomialWarmupLR(_WarmupLR):
    """Linear warm-up, then a polynomial down to `end_lr` (a learning rate, the same for all groups).

    `lr * (s + 1) / warmup_steps` for s < warmup_steps, else, with
    p = (s - warmup_steps) / (total_steps - warmup_steps), `end_lr + (lr - end_lr) * (1 - p) ** power`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        self.power = float(power)
        self.end_lr = float(end_lr)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _decayed(self, base_lr: Any, progress: float) -> Any:
        return self.end_lr + (base_lr - self.end_lr) * (1 - progress) ** self.power
