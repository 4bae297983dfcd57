"""Hooks that follow a result of evaluation: best weights, early stopping, learning-rate schedulers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import InputError, did_you_mean, refuse_below
from ..report.run import replace_file
from .hook import Hook

if TYPE_CHECKING:
    from .trainer import Trainer


class Monitor:
    """The best value so far of a result.

    Args:
        name: the result of evaluation, such as "eval_loss".
        mode: "min" if less is better, "max" if more is.
        min_delta: the smallest change that counts as an improvement.
    """

    def __init__(self, name: str, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise InputError(f"mode={mode!r}: expected 'min' (less is better) or 'max'")
        self.name, self.mode, self._min_delta = name, mode, min_delta
        self._sign = 1 if mode == "min" else -1
        self.reset()

    def reset(self) -> None:
        self.best = math.inf * self._sign

    def state_dict(self) -> dict[str, Any]:
        """The best value, and the name of the result."""
        return {"monitor": self.name, "mode": self.mode, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load the best value. Returns False, and loads nothing, if `state` is of another result."""
        is_same = (state["monitor"], state["mode"]) == (self.name, self.mode)
        if is_same:
            self.best = state["best"]
        return is_same

    def require(self, trainer: Trainer, hook: Hook) -> None:
        """Raise InputError if this `fit` has no evaluation."""
        if not trainer.evaluates:
            raise InputError(
                f"{type(hook).__name__} needs {self.name!r} from an evaluation, and this fit has none; give fit or "
                "initialize an eval_dataloader (and eval_interval= or eval_steps= above 0), or leave the hook out"
            )

    def read(self, results: Mapping[str, float]) -> float:
        """The value. Raises InputError if there is no result of that name."""
        if self.name not in results:
            raise InputError(
                f"monitor={self.name!r}: evaluation gave {', '.join(results) or 'nothing'}"
                f"{did_you_mean(self.name, results)}"
            )
        return results[self.name]

    def improves(self, results: Mapping[str, float]) -> bool:
        """Return True if this is the best value so far; nan never is."""
        value = self.read(results)
        is_better = self._sign * value < self._sign * self.best - self._min_delta
        self.best = value if is_better else self.best
        return is_better


class CheckpointHook(Hook):
    """Saves the weights with the best result of evaluation to `directory/best.safetensors`, and the result and its
    update to `best.json`. The config's key `checkpoint` saves checkpoints to resume from.

    Args:
        directory: a folder that all ranks share.
        monitor: the name of a result of evaluation.
        mode: "min" if less of it is better, "max" if more is.
    """

    def __init__(self, directory: str | Path, monitor: str, mode: Literal["min", "max"] = "min") -> None:
        self._directory = Path(directory)
        self._monitor = Monitor(monitor, mode)

    def state_dict(self) -> dict[str, Any]:
        return self._monitor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._monitor.load_state_dict(state)

    def before_fit(self, trainer: Trainer) -> None:
        self._monitor.require(trainer, self)
        if trainer.engine.global_step == 0:  # the hook may have been used in another run
            self._monitor.reset()

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        if not self._monitor.improves(results):
            return
        trainer.engine.save_weights(self._directory / "best.safetensors")
        if trainer.engine.context.rank == 0:
            best = {"step": trainer.engine.global_step, self._monitor.name: self._monitor.best}
            replace_file(self._directory / "best.json", json.dumps(best) + "\n")


class EarlyStopHook(Hook):
    """Stops after `patience` evaluations in a row without an improvement.

    A resumed run continues the count; a run that was stopped stops again until `patience` is raised. Evaluating twice
    at the same update counts once.

    Args:
        monitor: the name of a result of evaluation.
        mode: "min" if less is better, "max" if more is.
        min_delta: the smallest change that counts as an improvement.
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
        self._monitor.require(trainer, self)
        if trainer.engine.global_step == 0:  # the hook may have been used in another run
            self._monitor.reset()
            self._waited, self._last = 0, -1
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
            trainer.stop(f"{name} did not improve on {best:g} in {self._waited} evaluations")


class LRSchedulerHook(Hook):
    """Advances a scheduler that follows a result of evaluation (ReduceLROnPlateau): the one that was given to
    initialize, with `lr_interval="manual"` in the config. Other schedulers are advanced by the engine.

    Args:
        monitor: the name of that result.
    """

    def __init__(self, monitor: str = "eval_loss") -> None:
        self._monitor = Monitor(monitor)

    def before_fit(self, trainer: Trainer) -> None:
        engine = trainer.engine
        if engine.lr_scheduler is None:
            raise InputError("LRSchedulerHook: there is no scheduler; give initialize an lr_scheduler")
        if engine.config.lr_interval != "manual":
            raise InputError(
                "LRSchedulerHook: the engine advances the scheduler already (lr_interval="
                f"{engine.config.lr_interval!r}); leave the hook out, or set lr_interval='manual' in the config"
            )
        self._monitor.require(trainer, self)

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        trainer.engine.lr_scheduler.step(self._monitor.read(results))
