"""Who advances the learning-rate scheduler, and when: only for steps that were taken."""

from __future__ import annotations

from typing import Any, Literal

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
