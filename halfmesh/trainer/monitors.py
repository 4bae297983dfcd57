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


class MonitorHook(Hook):
    """Follows a result of evaluation, and keeps its best value.

    Args:
        monitor: the name of the result, such as "eval_loss".
        mode: "min" if less is better, "max" if more is.
        min_delta: the smallest change that counts as an improvement.
    """

    _kept: tuple[str, ...] = ("best",)
    """Attributes that are saved."""

    def __init__(self, monitor: str, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise InputError(f"mode={mode!r}: expected 'min' (less is better) or 'max'")
        self._monitor, self._mode, self._min_delta = monitor, mode, min_delta
        self._sign = 1 if mode == "min" else -1
        self._reset()

    def _reset(self) -> None:
        self.best = math.inf * self._sign

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self._kept}
        return {"monitor": self._monitor, "mode": self._mode, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (state["monitor"], state["mode"]) == (self._monitor, self._mode):  # else of another result
            for name in self._kept:
                setattr(self, name, state[name])

    def before_fit(self, trainer: Trainer) -> None:
        if not trainer.evaluates:
            raise InputError(
                f"{type(self).__name__} needs {self._monitor!r} from an evaluation, and this fit has none; give fit or "
                "initialize an eval_dataloader (and eval_interval= or eval_steps= above 0), or leave the hook out"
            )
        if trainer.engine.global_step == 0:  # the hook may have been used in another run
            self._reset()

    def _read(self, results: Mapping[str, float]) -> float:
        """The value. Raises InputError if there is no result of that name."""
        if self._monitor not in results:
            raise InputError(
                f"monitor={self._monitor!r}: evaluation gave {', '.join(results) or 'nothing'}"
                f"{did_you_mean(self._monitor, results)}"
            )
        return results[self._monitor]

    def _improves(self, results: Mapping[str, float]) -> bool:
        """Return True if this is the best value so far; nan never is."""
        value = self._read(results)
        is_better = self._sign * value < self._sign * self.best - self._min_delta
        self.best = value if is_better else self.best
        return is_better


class CheckpointHook(MonitorHook):
    """Saves the weights with the best result of evaluation to `directory/best.safetensors`, and the result and its
    update to `best.json`. The config's key `checkpoint` saves checkpoints to resume from.

    Args:
        directory: a folder that all ranks share.
        monitor: the name of a result of evaluation.
        mode: "min" if less of it is better, "max" if more is.
    """

    def __init__(self, directory: str | Path, monitor: str, mode: Literal["min", "max"] = "min") -> None:
        super().__init__(monitor, mode)
        self._directory = Path(directory)

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        if not self._improves(results):
            return
        trainer.engine.save_weights(self._directory / "best.safetensors")
        if trainer.engine.context.rank == 0:
            best = {"step": trainer.engine.global_step, self._monitor: self.best}
            replace_file(self._directory / "best.json", json.dumps(best) + "\n")


class EarlyStopHook(MonitorHook):
    """Stops after `patience` evaluations in a row without an improvement.

    A resumed run continues the count; a run that was stopped stops again until `patience` is raised. Evaluating twice
    at the same update counts once.

    Args:
        monitor: the name of a result of evaluation.
        mode: "min" if less is better, "max" if more is.
        min_delta: the smallest change that counts as an improvement.
    """

    _kept = ("best", "waited", "last")

    def __init__(
        self, monitor: str = "eval_loss", patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        refuse_below(1, patience=patience)
        self._patience = patience
        super().__init__(monitor, mode, min_delta)

    def _reset(self) -> None:
        super()._reset()
        self.waited, self.last = 0, -1

    def before_fit(self, trainer: Trainer) -> None:
        super().before_fit(trainer)
        self._stop_if_due(trainer)

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        improves, step = self._improves(results), trainer.engine.global_step
        if step != self.last:
            self.waited = 0 if improves else self.waited + 1
        self.last = step
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self.waited >= self._patience:
            trainer.stop(f"{self._monitor} did not improve on {self.best:g} in {self.waited} evaluations")


class LRSchedulerHook(MonitorHook):
    """Advances a scheduler that follows a result of evaluation (ReduceLROnPlateau): the one that was given to
    initialize, or each of several, with `lr_interval="manual"` in the config. The engine advances other schedulers.

    Args:
        monitor: the name of that result.
    """

    def __init__(self, monitor: str = "eval_loss") -> None:
        super().__init__(monitor)

    def before_fit(self, trainer: Trainer) -> None:
        scheduler, interval = trainer.engine.lr_scheduler, trainer.engine.config.lr_interval
        if scheduler is None or interval != "manual":
            has = "none was given" if scheduler is None else f"the engine advances it with lr_interval={interval!r}"
            raise InputError(f"LRSchedulerHook needs an lr_scheduler and lr_interval='manual' in the config, but {has}")
        super().before_fit(trainer)

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        given = trainer.engine.lr_scheduler
        for scheduler in given if isinstance(given, list) else [given]:
            scheduler.step(self._read(results))
