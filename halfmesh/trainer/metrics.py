"""Hooks on evaluation: metrics of torchmetrics over the right ranks; best weights, early stopping and learning-rate
schedulers, which follow a result."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..errors import InputError, did_you_mean, reject_below
from ..parallel.comm import broadcast_object
from ..report.run import replace_file
from .evaluation import gather_tensors
from .hook import Hook

if TYPE_CHECKING:
    from .batch import Outcome
    from .trainer import Trainer


def _output_and_target(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.output, outcome.target


class MetricHook(Hook):
    """Computes metrics of torchmetrics in evaluation, or in training.

    Combines states over the data ranks only, so each sample counts once in every layout. All ranks get the value that
    one process would compute.

    Args:
        metrics: torchmetrics metrics by name, or a MetricCollection. Results in evaluation are named "eval_" + name.
        on: "eval"; or "train", for the batches since the last record, which needs `keep_outputs` under a pipeline.
        arguments: returns the arguments of `metric.update`; (output, target) by default.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any] | nn.ModuleDict,
        on: Literal["eval", "train"] = "eval",
        arguments: Callable[[Outcome], tuple[Any, ...]] = _output_and_target,
    ) -> None:
        if on not in ("eval", "train"):
            raise InputError(f"on={on!r}: expected 'eval' or 'train'")
        self._metrics = dict(metrics.items())
        self._on = on
        self._arguments = arguments

    def before_fit(self, trainer: Trainer) -> None:
        if self._on == "train":
            self._begin(trainer)

    def after_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        if self._on == "train":
            self._update(outcome)

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        return self._compute(trainer, "") if self._on == "train" else {}

    def before_eval(self, trainer: Trainer) -> None:
        if self._on == "eval":
            self._begin(trainer)

    def after_eval_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        if self._on == "eval" and outcome.has_output:
            self._update(outcome)

    def eval_results(self, trainer: Trainer) -> Mapping[str, float]:
        return self._compute(trainer, "eval_") if self._on == "eval" else {}

    def _begin(self, trainer: Trainer) -> None:
        for metric in self._metrics.values():
            metric.to(trainer.engine.context.device)
            metric.reset()
            for part in _parts(metric):
                part.compute_with_cache = False
                part.distributed_available_fn = lambda: True  # then `dist_sync_fn` is called
        self._has_batch = False

    @torch.no_grad()
    def _update(self, outcome: Outcome) -> None:
        arguments = self._arguments(outcome)
        arguments = tuple(value.value() if hasattr(value, "is_ready") else value for value in arguments)
        for metric in self._metrics.values():
            metric.update(*arguments)
        self._has_batch = True

    def _compute(self, trainer: Trainer, prefix: str) -> dict[str, float]:
        """The values over the data ranks, on all ranks.

        Raises:
            InputError: on several ranks, a metric keeps states that cannot be combined (`Running`, of its window).
        """
        context = trainer.engine.context
        mine = None
        if context.counts_outputs and self._has_batch:  # other ranks have no usable states, or the same ones
            mine = {name: list(map(_state_of, _parts(metric))) for name, metric in self._metrics.items()}
        everyone = gather_tensors(mine, context)
        having = [rank for rank, states in enumerate(everyone) if states is not None]
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            filled = [everyone[rank][name] for rank in having]
            if context.size > 1 and any(set(map(type, of)) == {type(None)} for of in zip(*filled, strict=True)):
                raise InputError(f"metric {name!r}: a {type(metric).__name__} cannot be combined over ranks; remove it")
            if self._has_batch or not filled:
                values |= dict(_flat(prefix + name, _computed(metric, filled)))
            metric.reset()
        self._has_batch = False
        return broadcast_object(values, having[0], context.device) if having and context.size > 1 else values


def _parts(metric: Any) -> list[Any]:
    """The metrics that hold the states: `metric`, or those within a wrapper, or a sum of metrics."""
    inside = [part for child in metric.children() for part in _parts(child)]
    return inside or [metric] * hasattr(metric, "dist_sync_fn")


def _state_of(metric: Any) -> list[torch.Tensor] | None:
    """The tensors of this rank's metric, in the order in which torchmetrics gathers them; None before an update."""
    if not metric.update_count:
        return None
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        found.append(tensor)
        return [tensor]

    with metric.sync_context(dist_sync_fn=note):
        pass
    return [tensor.detach().cpu() for tensor in found]


def _computed(metric: Any, filled: list[list[Any]]) -> Any:
    """The value of the combined states. (With torchmetrics' own gathering, a rank without a batch sends nothing if the
    state is a list, and the others hang.)"""
    for number, part in enumerate(_parts(metric)):
        states = [state for state in (parts[number] for parts in filled) if state]
        # From the first one again where a metric is computed twice, as in a * b / (a + b).
        places = itertools.cycle(range(len(states[0]))) if states else itertools.repeat(0)
        part.dist_sync_fn = partial(_take, places, states)
    return metric.compute()


def _take(places: Iterator[int], states: list[Any], tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """What torchmetrics asks for in place of gathering `tensor`: the next tensor of each of `states`."""
    place = next(places)
    return [state[place].to(tensor.device) for state in states] or [tensor]


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """A metric's value as plain numbers; values of dicts are named by key, values of vectors by index."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}_{key}", item)
    elif isinstance(value, (tuple, list)) or (isinstance(value, torch.Tensor) and value.dim() > 0):
        for index, item in enumerate(value):
            yield from _flat(f"{name}_{index}", item)
    else:
        yield name, float(value)


# -- hooks that follow a result ----------------------------------------------------------------------------------------


class MonitorHook(Hook):
    """Follows a result of evaluation and keeps its best value.

    Args:
        monitor: the name of the result, such as "eval_loss".
        mode: "min" if lower is better, "max" if higher is better.
        min_delta: the smallest change that counts as an improvement.
    """

    _kept: tuple[str, ...] = ("best",)
    """Attributes that are saved."""

    def __init__(self, monitor: str, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise InputError(f"mode={mode!r}: expected 'min' (lower is better) or 'max'")
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
                f"{type(self).__name__} needs {self._monitor!r} from an evaluation, but this fit has none; give fit or "
                "initialize an eval_dataloader (and eval_interval= or eval_steps= above 0), or remove the hook"
            )
        if trainer.engine.global_step == 0:  # the hook may have been used in another run
            self._reset()

    def _read(self, results: Mapping[str, float]) -> float:
        """The value. Raises InputError if there is no result of that name."""
        if self._monitor not in results:
            raise InputError(
                f"monitor={self._monitor!r}: the results of evaluation are {', '.join(results) or 'none'}"
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
    update to `best.json`. To save checkpoints for resuming, set the config key `checkpoint`.

    Args:
        directory: a folder that all ranks share.
        monitor: the name of a result of evaluation.
        mode: "min" if lower is better, "max" if higher is better.
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

    A resumed run continues the count. A run that was stopped stops again until you raise `patience`. Evaluating twice
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
        reject_below(1, patience=patience)
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
    """Advances the schedulers that you passed to initialize by a result of evaluation (ReduceLROnPlateau). Needs
    `lr_interval="manual"` in the config. The engine advances other schedulers.

    Args:
        monitor: the name of that result.
    """

    def __init__(self, monitor: str = "eval_loss") -> None:
        super().__init__(monitor)

    def before_fit(self, trainer: Trainer) -> None:
        scheduler, interval = trainer.engine.lr_scheduler, trainer.engine.config.lr_interval
        if scheduler is None or interval != "manual":
            has = "there is none" if scheduler is None else f"the engine advances it with lr_interval={interval!r}"
            raise InputError(f"LRSchedulerHook needs an lr_scheduler and lr_interval='manual' in the config, but {has}")
        super().before_fit(trainer)

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        given = trainer.engine.lr_scheduler
        for scheduler in given if isinstance(given, list) else [given]:
            scheduler.step(self._read(results))
