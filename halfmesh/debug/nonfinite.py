"""Finds the first inf or nan of an update: in weights, the batch, outputs of modules, the loss and gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..amp.step_result import StepResult
from ..errors import NonFiniteError
from ..loop.parts import EngineHook, EngineParts
from ..parallel.pipeline.microbatches import parameter_names
from ..shard import compute_dtype
from ..tensors import tensors_of
from .diagnosis import Diagnosis, Fault, Kind, advise, history
from .probes import CRITERION, Probes, Visit
from .tensor_stats import is_finite, largest_number, measure

_WEIGHT, _INPUT, _FORWARD, _BACKWARD = range(4)
"""Phases of a microbatch."""


class NonFiniteProbes(Probes, EngineHook):
    """Watches the modules in the updates before `max_consecutive_skips` stops the run, or with `debug="nonfinite"` in
    all; a NonFiniteError then says where inf or nan came from. Watching reads the host at each module."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self._always = parts.config.debug == "nonfinite"
        self._first: Fault | None = None
        self._grad: torch.Tensor | None = None  # that of the fault, if it is a gradient
        self._users: list[Visit] = []
        if self._always:
            self.attach()

    # -- events of the loop ------------------------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = self._parts.model
        if not (self.attached and model.training):
            return
        if not self._parts.accumulation.holds_gradients:
            for index, (name, param) in enumerate(model.named_parameters()):
                self._look_at_weight(index, name, param, compute_dtype(param))
        for index, (name, tensor) in enumerate(_arguments(model, args, kwargs)):
            if not is_finite(tensor):
                self._take("input", name, "", tensor, self._key(_INPUT, order=index))

    def after_backward(self, loss: Any) -> None:
        if self.attached:
            for tensor in tensors_of(loss):
                if not is_finite(tensor):
                    self._take("loss", "", "", tensor, self._key(_FORWARD, order=sys.maxsize))

    def after_step(self, result: StepResult) -> None:
        nears_limit = self._parts.update.skip_counter.nears_limit
        if self.attached:
            self._forget()
            if not (nears_limit or self._always):
                self.detach()
        elif nears_limit:
            self.attach()

    def on_error(self, error: NonFiniteError) -> None:
        parts = self._parts
        if parts.config.name is not None:
            error.add_note(f"in the engine named {parts.config.name!r}")
        results, losses = list(parts.results), parts.update.loss_scales
        scale = losses.current()[0] if losses.scalers else None
        fault = _first_of_all(parts.context.everyone(self._first))
        error.diagnosis = Diagnosis(
            scales=() if scale is None else history([*(result.loss_scale for result in results), scale]),
            skipped=sum(result.skipped for result in results),
            updates=len(results),
            was_watched=self.attached,
            fault=fault,
            advice=advise(fault, self.attached, parts.update.recipe, scale),
            world_size=parts.context.size,
        )
        error.args = (f"{error}\n{error.diagnosis}",)
        self._forget()

    def close(self, error: BaseException | None) -> None:
        self.detach()

    # -- what the modules do -----------------------------------------------------------------------------------

    def entered(self, visit: Visit) -> None:
        bad = _first_bad(visit.inputs)
        if bad is not None:
            kind: Kind = "target" if visit.name == CRITERION and not bad.requires_grad else "between"
            around = () if visit.caller is None else (_words(visit.caller),)
            self._take(kind, visit.name, visit.kind, bad, self._key(_FORWARD, visit, visit.order), around=around)

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        bad = _first_bad(outputs)
        if bad is not None:
            kind: Kind = "loss" if visit.name == CRITERION else "output"
            inputs = max((measure(tensor).largest for tensor in visit.inputs), default=0.0)
            self._take(kind, visit.name, visit.kind, bad, self._key(_FORWARD, visit, visit.order), inputs=inputs)

    def gradient(self, visit: Visit, of_input: bool, grad: torch.Tensor, order: int) -> None:
        if grad is self._grad and self._first is not None:
            if of_input:
                self._users.append(visit)
                self._first = replace(self._first, around=tuple(_innermost(self._users)))
            return
        if is_finite(grad):
            return
        name, layer = ("", "") if of_input else (visit.name, visit.kind)
        around = (_words(visit),) if of_input else ()
        if self._take("gradient", name, layer, grad, self._key(_BACKWARD, visit, order), around=around):
            self._grad, self._users = grad, [visit] if of_input else []

    # -- parts -------------------------------------------------------------------------------------------------

    def _look_at_weight(self, index: int, name: str, param: torch.Tensor, dtype: torch.dtype) -> None:
        fits = dtype == param.dtype or measure(param).largest <= largest_number(dtype)
        if not (fits and is_finite(param)):
            self._take("weight", name, "", param, self._key(_WEIGHT, order=index), dtype=dtype)

    def _key(self, phase: int, visit: Visit | None = None, order: int = 0) -> tuple[int, ...]:
        """Microbatches of a pipeline do not depend on each other; within one, stages follow each other, and in backward
        the other way round."""
        cycle = self._parts.accumulation.index
        microbatch, stage = (0, 0) if visit is None else (visit.microbatch, visit.stage)
        return cycle, phase, microbatch, -stage if phase == _BACKWARD else stage, order

    def _take(self, kind: Kind, name: str, layer: str, tensor: torch.Tensor, key: tuple[int, ...], **more: Any) -> bool:
        """Note a fault. Returns whether it comes before what was found so far."""
        if self._first is not None and self._first.key <= key:
            return False
        self._first = Fault(kind, name, layer, more.pop("dtype", tensor.dtype), measure(tensor), key, **more)
        self._grad = None
        return True

    def _forget(self) -> None:
        self._first, self._grad, self._users = None, None, []


def _first_of_all(faults: Sequence[Fault | None]) -> Fault | None:
    """The first of what the ranks have found, each in its place of `faults`, with all ranks that have it."""
    found = [fault for fault in faults if fault is not None]
    if not found:
        return None
    first = min(found, key=lambda fault: fault.key)
    what = first.key, first.kind, first.name
    same = [rank for rank, f in enumerate(faults) if f is not None and (f.key, f.kind, f.name) == what]
    return replace(first, ranks=tuple(same))


def _arguments(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the model is called with, each with the name of the argument."""
    names = [name for name in parameter_names(model) if not name.startswith("*")]
    named = [(names[i] if i < len(names) else f"{i + 1}", value) for i, value in enumerate(args)]
    for name, value in [*named, *kwargs.items()]:
        for tensor in tensors_of(value):
            yield name, tensor


def _first_bad(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    return next((tensor for tensor in tensors if not is_finite(tensor)), None)


def _innermost(visits: Sequence[Visit]) -> list[str]:
    """Without those that only hand the tensor on to others among them."""
    callers = {id(visit.caller) for visit in visits}
    return list(dict.fromkeys(_words(visit) for visit in visits if id(visit) not in callers))


def _words(visit: Visit) -> str:
    if visit.name == CRITERION:
        return CRITERION
    return f"{visit.name!r} ({visit.kind})" if visit.name else f"the model itself ({visit.kind})"
