"""Advances a learning-rate scheduler that the engine does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import InputError
from ..trainer.hook import Hook
from .monitor import Monitor

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..trainer.trainer import Trainer


class LRSchedulerHook(Hook):
    """Advances the scheduler that was given to initialize, with `lr_interval="manual"` in the config: where it is saved
    with the run, and nobody else advances it.

    Args:
        interval: after each "step" that was not skipped (which reads the device), after each "epoch", or after each
            "eval" with one of its results, as ReduceLROnPlateau wants it.
        monitor: that result.
    """

    def __init__(self, interval: Literal["step", "epoch", "eval"] = "epoch", monitor: str = "eval_loss") -> None:
        if interval not in ("step", "epoch", "eval"):
            raise InputError(f"interval={interval!r}: expected 'step', 'epoch' or 'eval'")
        self._interval = interval
        self._monitor = Monitor(monitor, "min")
        self._scheduler: Any = None

    def before_fit(self, trainer: Trainer) -> None:
        engine = trainer.engine
        self._scheduler = engine.lr_scheduler
        if self._scheduler is None:
            raise InputError("LRSchedulerHook: there is no scheduler; give initialize an lr_scheduler")
        if engine.config.lr_interval != "manual":
            raise InputError(
                "LRSchedulerHook: the engine advances the scheduler already (lr_interval="
                f"{engine.config.lr_interval!r}); leave the hook out, or set lr_interval='manual' in the config"
            )
        if self._interval == "eval":
            self._monitor.require(trainer, "LRSchedulerHook")
        elif isinstance(self._scheduler, ReduceLROnPlateau):
            raise InputError(
                "LRSchedulerHook: ReduceLROnPlateau needs a result of evaluation, which "
                f"interval={self._interval!r} does not give it; use LRSchedulerHook(interval='eval')"
            )

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._interval == "step" and not result.skipped:
            self._scheduler.step()

    def after_epoch(self, trainer: Trainer) -> None:
        if self._interval == "epoch":
            self._scheduler.step()

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        if self._interval == "eval":
            self._scheduler.step(self._monitor.read(results))
