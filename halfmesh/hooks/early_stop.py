"""Ends training when a result of evaluation no longer gets better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..errors import refuse_below
from ..trainer.hook import Hook
from .monitor import Monitor

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class EarlyStopHook(Hook):
    """Stops after `patience` evaluations in a row that were no better than the best before them.

    A run that goes on counts on: what has been stopped stays so, until `patience` is larger. An evaluation that is made
    again at the same update does not count again.

    Args:
        monitor: the name of a result of evaluation.
        mode: whether less ("min") or more ("max") is better.
        min_delta: what has to be gained to count as better.
    """

    def __init__(
        self, monitor: str = "eval_loss", patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        refuse_below(1, patience=patience)
        self._monitor = Monitor(monitor, mode, min_delta)
        self._patience = patience
        self._waited, self._last = 0, -1

    def state_dict(self) -> dict[str, Any]:
        return {**self._monitor.state_dict(), "waited": self._waited, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._monitor.load_state_dict(state):
            self._waited, self._last = state["waited"], state["last"]

    def before_fit(self, trainer: Trainer) -> None:
        self._monitor.require(trainer, "EarlyStopHook")
        if trainer.engine.global_step == 0:  # this object may have seen another run
            self._monitor.best, self._waited, self._last = self._monitor.worst, 0, -1
        self._stop_if_due(trainer)

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        step = trainer.engine.global_step
        improves = self._monitor.improves(results)
        if step != self._last:
            self._waited = 0 if improves else self._waited + 1
        self._last = step
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self._waited >= self._patience:
            name, best = self._monitor.name, self._monitor.best
            trainer.stop(f"{name} was not better than {best:g} in {self._waited} evaluations")
