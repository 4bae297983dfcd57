"""Learning rates: who advances the scheduler, and schedulers with a warm-up, as closed formulas of the step.

Each class with a warm-up gives the learning rate of step `s` (counted from 0, in calls of `scheduler.step()`: optimizer
steps by default) as a function of `s` and of the group's own base rate `lr`. So every parameter group keeps its ratio
to the others, and resuming needs `s` only. Beyond `total_steps` the last value stays.

The names and formulas are those of Colossal-AI's `colossalai.nn.lr_scheduler`; there, too, step 0 does not have rate 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from numbers import Integral
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..amp.step_result import StepResult
from ..errors import InputError

LRInterval = Literal["step", "epoch", "manual"]


class LRAdvance:
    """Advances `scheduler` for the engine.

    With interval "step" the scheduler waits for the verdict on a step. Reading it at once would hold up the device, so
    it is read before the next update (`settle`): every update uses the right learning rate all the same.

    Args:
        scheduler: anything with `step()`, or None.
        may_skip: whether steps can be skipped at all; if not, the scheduler is advanced at once.
    """

    def __init__(self, scheduler: Any, interval: LRInterval, may_skip: bool) -> None:
        self.scheduler = scheduler
        self.interval = interval
        self._may_skip = may_skip
        self._pending: StepResult | None = None
        self._position: int | None = getattr(scheduler, "last_epoch", None)

    def after(self, result: StepResult) -> None:
        """An update was made."""
        if self.scheduler is None or self.interval != "step":
            return
        self._pending = result
        if not self._may_skip:
            self.settle()

    def settle(self) -> None:
        """Advance for the last update, if it was taken and has not been counted."""
        result, self._pending = self._pending, None
        if result is not None and not result.skipped:
            self._advance()

    def _advance(self) -> None:
        position = getattr(self.scheduler, "last_epoch", None)
        if position is not None and self._position is not None and position == self._position + 1:
            raise InputError(
                f"lr_scheduler.step() was called outside the engine, which advances it itself with lr_interval="
                f"{self.interval!r}; remove the call, or set lr_interval='manual'"
            )
        self.scheduler.step()
        self._position = getattr(self.scheduler, "last_epoch", None)

    def end_epoch(self) -> None:
        """An epoch of the engine's dataloader is over."""
        self.settle()
        if self.scheduler is not None and self.interval == "epoch":
            self._advance()

    def state_dict(self) -> Any:
        """The scheduler's state; call `settle` before."""
        return None if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` gave."""
        self._pending = None
        if self.scheduler is not None and state is not None:
            self.scheduler.load_state_dict(state)
            self._position = getattr(self.scheduler, "last_epoch", None)


class _WarmupLR(LRScheduler):
    """`lr * (s + 1) / warmup_steps` for s < warmup_steps, then `decayed(lr, s)`.

    As in torch, `load_state_dict` also restores `total_steps` and the other arguments of the saved scheduler.
    """

    may_end_in_warmup = False

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int, last_epoch: int) -> None:
        self.total_steps = _steps("total_steps", total_steps, at_least=1)
        self.warmup_steps = _steps("warmup_steps", warmup_steps, at_least=0)
        if self.warmup_steps >= self.total_steps and not self.may_end_in_warmup:
            raise InputError(
                f"warmup_steps={warmup_steps} leaves no step of total_steps={total_steps} to {type(self).__name__}'s "
                "decay; give fewer warm-up steps or more steps in total, or use LinearWarmupLR, which may end within "
                "its warm-up"
            )
        super().__init__(optimizer, last_epoch)  # last: it sets the optimizer's learning rates

    def get_lr(self) -> list[Any]:
        """The learning rate of each parameter group at step `last_epoch`."""
        return [self._lr_at(self.last_epoch, base_lr) for base_lr in self.base_lrs]

    def _lr_at(self, step: int, base_lr: Any) -> Any:
        if step < self.warmup_steps:
            return base_lr * (step + 1) / self._warmup_divisor
        return self._decayed(base_lr, min(step, self.total_steps))

    @property
    def _warmup_divisor(self) -> int:
        return self.warmup_steps

    def _decayed(self, base_lr: Any, step: int) -> Any:
        raise NotImplementedError

    def _progress(self, step: int) -> float:
        """How much of the time after the warm-up is over: 0 to 1."""
        return (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)


class LinearWarmupLR(_WarmupLR):
    """Linear warm-up, then linear decay to 0 at `total_steps`.

    `lr * (s + 1) / (warmup_steps + 1)` for s < warmup_steps, else
    `lr * (total_steps - s) / (total_steps - warmup_steps)`; 0 from `total_steps` on. The warm-up may be longer than the
    whole (a short trial run): then the rate only rises while it lasts.

    Raises:
        InputError: steps that are not whole numbers, `total_steps` below 1 or `warmup_steps` below 0.
    """

    may_end_in_warmup = True

    def __init__(self, optimizer: Optimizer, warmup_steps: int, total_steps: int, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    @property
    def _warmup_divisor(self) -> int:
        return self.warmup_steps + 1

    def _decayed(self, base_lr: Any, step: int) -> Any:
        # max: with a warm-up beyond the end, the numerator is 0 here and the divisor must not be
        return base_lr * (self.total_steps - step) / max(1, self.total_steps - self.warmup_steps)


class CosineAnnealingWarmupLR(_WarmupLR):
    """Linear warm-up, then half a cosine down to `eta_min` (a learning rate, the same for all groups).

    `lr * (s + 1) / warmup_steps` for s < warmup_steps, else, with
    p = (s - warmup_steps) / (total_steps - warmup_steps), `eta_min + (lr - eta_min) * (1 + cos(pi * p)) / 2`
    (Loshchilov and Hutter, 2017, "SGDR", equation 5, one cycle).

    Raises:
        InputError: as LinearWarmupLR; no step after the warm-up; `eta_min` negative or above a group's rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = _final_lr("eta_min", eta_min, optimizer)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _decayed(self, base_lr: Any, step: int) -> Any:
        return self.eta_min + (base_lr - self.eta_min) * (1 + math.cos(math.pi * self._progress(step))) / 2


class MultiStepWarmupLR(_WarmupLR):
    """Linear warm-up, then the rate times `gamma` at each milestone.

    `lr * (s + 1) / warmup_steps` for s < warmup_steps, else `lr * gamma ** (number of milestones <= s)`. Milestones are
    steps counted from the start of training, warm-up included; those beyond `total_steps` are not reached.

    Raises:
        InputError: as LinearWarmupLR; no step after the warm-up; milestones within the warm-up; `gamma` not above 0.
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
        if not gamma > 0:
            raise InputError(f"gamma={gamma!r} would not leave a positive learning rate; give a number above 0")
        self.gamma = float(gamma)
        self.milestones = sorted(_steps("a milestone", milestone, at_least=1) for milestone in milestones)
        early = [milestone for milestone in self.milestones if milestone < warmup_steps]
        if early:
            raise InputError(
                f"milestones {early} lie within the warm-up of {warmup_steps} steps; milestones count from the start "
                "of training: give later ones, or a shorter warm-up"
            )
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _decayed(self, base_lr: Any, step: int) -> Any:
        return base_lr * self.gamma ** bisect_right(self.milestones, step)


class PolynomialWarmupLR(_WarmupLR):
    """Linear warm-up, then a polynomial down to `end_lr` (a learning rate, the same for all groups).

    `lr * (s + 1) / warmup_steps` for s < warmup_steps, else, with
    p = (s - warmup_steps) / (total_steps - warmup_steps), `end_lr + (lr - end_lr) * (1 - p) ** power`.

    Raises:
        InputError: as LinearWarmupLR; no step after the warm-up; `end_lr` negative or above a group's rate; `power`
            not above 0.
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
        if not power > 0:
            raise InputError(f"power={power!r} would not let the learning rate fall; give a number above 0")
        self.power = float(power)
        self.end_lr = _final_lr("end_lr", end_lr, optimizer)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _decayed(self, base_lr: Any, step: int) -> Any:
        return self.end_lr + (base_lr - self.end_lr) * (1 - self._progress(step)) ** self.power


def _steps(name: str, value: object, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise InputError(
            f"{name}={value!r}: expected a whole number of at least {at_least}, in optimizer steps "
            "(for epochs: epochs * optimizer steps per epoch)"
        )
    return int(value)


def _final_lr(name: str, value: float, optimizer: Optimizer) -> float:
    """Check that the rate can fall to `value` in every group."""
    if not value >= 0:
        raise InputError(f"{name}={value!r}: expected a learning rate of at least 0")
    for index, group in enumerate(optimizer.param_groups):
        base_lr = float(group.get("initial_lr", group["lr"]))
        if base_lr < value:
            raise InputError(
                f"{name}={value!r} is above the learning rate {base_lr!r} of parameter group {index}, which would "
                f"rise to it; give {name} <= {base_lr!r}"
            )
    return float(value)
