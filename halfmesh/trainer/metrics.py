"""Metrics of torchmetrics, over the right ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..errors import InputError
from ..parallel.comm import broadcast_object
from .evaluation import gather_tensors
from .hook import Hook

if TYPE_CHECKING:
    from .batch import Outcome
    from .trainer import Trainer


def _output_and_target(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.output, outcome.target


class MetricHook(Hook):
    """Computes metrics of torchmetrics in evaluation, or in training.

    States are combined over the data ranks only, so each sample counts once in every layout. The value is the same as
    with one process, on all ranks.

    Args:
        metrics: torchmetrics metrics by name, or a MetricCollection. Results in evaluation are named "eval_" + name.
        on: "eval", or "train" for the batches since the last record. Under a pipeline "train" needs `keep_outputs`.
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
            metric.compute_with_cache = False
            metric.distributed_available_fn = lambda: True  # then `dist_sync_fn` is called

    @torch.no_grad()
    def _update(self, outcome: Outcome) -> None:
        arguments = self._arguments(outcome)
        arguments = tuple(value.value() if hasattr(value, "is_ready") else value for value in arguments)
        for metric in self._metrics.values():
            metric.update(*arguments)

    def _compute(self, trainer: Trainer, prefix: str) -> dict[str, float]:
        """The values over the data ranks, on all ranks."""
        context = trainer.engine.context
        mine = None
        if context.counts_outputs:  # other ranks have no outputs, or the same ones
            mine = {name: _state_of(metric) for name, metric in self._metrics.items()}
        everyone = gather_tensors(mine, context)
        having = [rank for rank, states in enumerate(everyone) if states and None not in states.values()]
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            filled = [everyone[rank][name] for rank in having]
            if metric.update_count or not filled:
                values |= dict(_flat(prefix + name, _computed(metric, filled)))
            metric.reset()
        # A rank without a batch has no usable state.
        return broadcast_object(values, having[0], context.device) if having and context.size > 1 else values


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


def _computed(metric: Any, filled: list[list[torch.Tensor]]) -> Any:
    """The value of the combined states. (With torchmetrics' own gathering, a rank without a batch sends nothing if the
    state is a list, and the others hang.)"""
    counter = itertools.count()

    def theirs(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        number = next(counter)
        return [state[number].to(tensor.device) for state in filled] or [tensor]

    metric.dist_sync_fn = theirs
    return metric.compute()


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
