"""The first inf or nan of a replay, in order of computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from ..shard import compute_dtype
from .probes import CRITERION, Listener, Visit
from .tensor_numbers import Numbers, is_fine, largest_number, look_at

Kind = Literal["weight", "input", "target", "between", "output", "loss", "gradient", "parameter", "complete gradient"]
_PHASES: dict[Kind, int] = {"weight": 0, "input": 1, "gradient": 3, "parameter": 3, "complete gradient": 4}
_FORWARD = 2


@dataclass(frozen=True)
class Fault:
    """One inf or nan, and what it looked like around it.

    Attributes:
        kind: what holds it. "between": what a module was given by operations between modules. "parameter": the gradient
            of a parameter on one rank; "complete gradient": the same, summed over ranks.
        name: of the module, parameter or argument.
        layer: the module's class; "" where there is none.
        dtype: of what holds it, or what it was computed in.
        numbers: of the tensor.
        inputs, weights: of an "output" or "loss", the largest finite magnitude that went into it.
        inner: whether the module has others in it, which are all fine.
        around: for "between" the module whose forward does the operations, for "gradient" what used the tensor.
        key: in which order it was computed, to compare over ranks.
        ranks: where it is.
    """

    kind: Kind
    name: str
    layer: str
    dtype: torch.dtype
    numbers: Numbers
    key: tuple[int, ...]
    inputs: float = 0.0
    weights: float = 0.0
    inner: bool = False
    around: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class FaultFinder(Listener):
    """Finds the first fault of this rank.

    Attributes:
        first: None: everything is finite.
    """

    def __init__(self) -> None:
        self.first: Fault | None = None
        self._grad: torch.Tensor | None = None  # of the fault that was found last
        self._users: list[Visit] = []
        self._place = 0, 0  # microbatch and stage of the gradients that come now

    def look_at_start(self, model: nn.Module, arguments: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Weights of this rank, and what the forward was called with."""
        for index, (name, param) in enumerate(model.named_parameters()):
            self._look_at_weight(index, name, param, compute_dtype(param))
        for index, (name, tensor) in enumerate(arguments):
            if not is_fine(tensor):
                self._take(Fault("input", name, "", tensor.dtype, look_at(tensor), (1, 0, 0, index)))

    def entered(self, visit: Visit) -> None:
        bad = _first_bad(visit.inputs)
        if bad is None:
            return
        is_loss = visit.name == CRITERION
        kind: Kind = "target" if is_loss and not bad.requires_grad else "between"
        around = () if visit.caller is None else (_words(visit.caller),)
        layer = "" if is_loss else type(visit.module).__name__
        self._take(self._fault(kind, visit.name, layer, bad, _key(kind, visit, visit.order), around=around))

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        bad = _first_bad(outputs)
        if bad is None:
            return
        is_loss = visit.name == CRITERION
        kind: Kind = "loss" if is_loss else "output"
        module = visit.module if isinstance(visit.module, nn.Module) else nn.Module()
        weights = [look_at(p).largest for p in module.parameters(recurse=False)]
        fault = self._fault(
            kind,
            visit.name,
            "" if is_loss else type(module).__name__,
            bad,
            _key(kind, visit, visit.order),
            inputs=max((look_at(t).largest for t in visit.inputs), default=0.0),
            weights=max(weights, default=0.0),
            inner=not is_loss and any(True for _ in module.children()),
        )
        self._take(fault)

    def gradient(self, visit: Visit, of_input: bool, grad: torch.Tensor, order: int) -> None:
        self._place = visit.microbatch, -visit.stage
        if grad is self._grad and self.first is not None:
            if of_input:
                self._users.append(visit)
                self.first = replace(self.first, around=tuple(_innermost(self._users)))
            return
        if is_fine(grad):
            return
        key = _key("gradient", visit, order)
        layer = "" if visit.name == CRITERION else type(visit.module).__name__
        users = (_words(visit),) if of_input else ()
        name = "" if of_input else visit.name
        if self._take(self._fault("gradient", name, "" if of_input else layer, grad, key, around=users)):
            self._grad, self._users = grad, [visit] if of_input else []

    def parameter_gradient(self, name: str, grad: torch.Tensor, order: int) -> None:
        if not is_fine(grad):
            self._take(self._fault("parameter", name, "", grad, (_PHASES["parameter"], *self._place, order)))

    def complete_gradient(self, name: str, grad: torch.Tensor) -> None:
        if not is_fine(grad):
            self._take(self._fault("complete gradient", name, "", grad, (_PHASES["complete gradient"], 0, 0, 0)))

    # -- parts -------------------------------------------------------------------------------------------------

    def _look_at_weight(self, index: int, name: str, param: torch.Tensor, dtype: torch.dtype) -> None:
        fits = dtype == param.dtype or look_at(param).largest <= largest_number(dtype)
        if not (fits and is_fine(param)):
            self._take(Fault("weight", name, "", dtype, look_at(param), (_PHASES["weight"], 0, 0, index)))

    def _fault(
        self, kind: Kind, name: str, layer: str, tensor: torch.Tensor, key: tuple[int, ...], **more: Any
    ) -> Fault:
        return Fault(kind, name, layer, tensor.dtype, look_at(tensor), key, **more)

    def _take(self, fault: Fault) -> bool:
        """Whether it comes before what was found so far."""
        if self.first is not None and self.first.key <= fault.key:
            return False
        self.first, self._grad = fault, None
        return True


def first_of_all(faults: Sequence[Fault | None]) -> Fault | None:
    """The first of what the ranks have found, each in its place of `faults`, with all ranks that have it."""
    found = [fault for fault in faults if fault is not None]
    if not found:
        return None
    first = min(found, key=lambda fault: fault.key)
    what = first.key, first.kind, first.name
    same = [rank for rank, f in enumerate(faults) if f is not None and (f.key, f.kind, f.name) == what]
    return replace(first, ranks=tuple(same))


def _key(kind: Kind, visit: Visit, order: int) -> tuple[int, ...]:
    """Microbatches of a pipeline do not depend on each other; within one, stages follow each other, back in "
    "backward."""
    phase = _PHASES.get(kind, _FORWARD)
    return phase, visit.microbatch, -visit.stage if phase > _FORWARD else visit.stage, order


def _first_bad(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    return next((tensor for tensor in tensors if not is_fine(tensor)), None)


def _innermost(visits: Sequence[Visit]) -> list[str]:
    """Without those that only hand the tensor on to others among them."""
    callers = {id(visit.caller) for visit in visits}
    return list(dict.fromkeys(_words(visit) for visit in visits if id(visit) not in callers))


def _words(visit: Visit) -> str:
    if visit.name == CRITERION:
        return CRITERION
    kind = type(visit.module).__name__
    return f"{visit.name!r} ({kind})" if visit.name else f"the model itself ({kind})"
