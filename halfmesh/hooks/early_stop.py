"""Ends training when a result of evaluation no longer gets better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from ..trainer.hook import Hook
from .monitor import Monitor

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class EarlyStopHook(Hook):
    """Stops after `patience` evaluations in a row that were no better than the best before them.

    Args:
        monitor: the name of a result of evaluation.
        mode: whether less ("min") or more ("max") is better.
        min_delta: what has to be gained to count as better.
    """

    def __init__(
        self, monitor: str = "eval_loss", patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        self._monitor = Monitor(monitor, mode, min_delta)
        self._patience = patience
        self._waited = 0

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        self._waited = 0 if self._monitor.improves(results) else self._waited + 1
        if self._waited >= self._patience:
            name, best = self._monitor.name, self._monitor.best
            trainer.stop(f"{name} was not better than {best:g} in {self._waited} evaluations")
