"""Hooks on the modules of a training step: what goes in, what comes out, and the gradients of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .._torch import is_compiled, is_in_backward
from ..loop.parts import EngineParts
from ..tensors import tensors_of

CRITERION = "the criterion"


@dataclass(eq=False)
class Visit:
    """One call of a module, or of the criterion.

    Attributes:
        name: of the module in the whole model, or `CRITERION`.
        stage, microbatch: of a pipeline.
        order: how many calls began or ended on this rank before this one did.
        caller: the module whose forward called it; None for the outermost.
    """

    name: str
    module: Any
    stage: int
    microbatch: int
    order: int
    caller: Visit | None
    inputs: Sequence[torch.Tensor] = ()

    @property
    def kind(self) -> str:
        """The module's class; "" of the criterion."""
        return "" if self.name == CRITERION else type(self.module).__name__


class Probes:
    """Between `attach` and `detach`, calls the methods below for training forwards and their backwards.

    What activation checkpointing computes again counts once. Compiled modules run uncompiled: they have no place for
    hooks.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._names: dict[nn.Module, str] = {}
        self._scope = ExitStack()
        self._order = 0
        self._place = 0, 0  # stage and microbatch
        self._open: list[Visit] = []

    # -- to override -------------------------------------------------------------------------------------------

    def entered(self, visit: Visit) -> None:
        """A call begins; `visit.inputs` are what it was given."""

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        """It ends."""

    def gradient(self, visit: Visit, of_input: bool, grad: torch.Tensor, order: int) -> None:
        """The gradient of one of its outputs, or inputs. One tensor may be several of those; they follow each other,
        with the same `grad`, from the one that made it to what used it."""

    # -- hooks -------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the hooks are there."""
        return bool(self._names)

    def attach(self) -> None:
        """Put the hooks on."""
        parts, scope = self._parts, self._scope
        partition, criterion = parts.division.plans.partition, parts.criterion
        passed_by = set() if partition is None else {module for _, module in partition.not_called(parts.model)}
        self._names = {module: name for name, module in parts.model.named_modules() if module not in passed_by}
        if isinstance(criterion, nn.Module):
            self._names[criterion] = CRITERION
        elif criterion is not None:
            scope.callback(setattr, parts, "criterion", criterion)
            parts.criterion = self._watched(criterion)
        scope.enter_context(eager(parts))
        for stage in parts.executor.stages:
            scope.callback(stage.register_forward_pre_hook(self._begin_stage, with_kwargs=True).remove)
        for module in self._names:
            scope.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            scope.callback(module.register_forward_hook(self._leave).remove)

    def detach(self) -> None:
        """Take the hooks off."""
        self._scope.close()
        self._names, self._open = {}, []

    def _watched(self, criterion: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._parts.model.training:
                return criterion(*args, **kwargs)
            visit = self._begin(CRITERION, criterion, [args, kwargs])
            value = criterion(*args, **kwargs)
            self._end(visit, tensors_of(value))
            return value

        call.forward = getattr(criterion, "forward", criterion)  # type: ignore[attr-defined]  # whose signature counts
        return call

    def _begin_stage(self, stage: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._place = stage.index, int(kwargs["index"])

    @torch.compiler.disable
    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._parts.model.training and not is_in_backward():
            self._open.append(self._begin(self._names[module], module, [args, kwargs]))

    @torch.compiler.disable
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (self.attached and self._parts.model.training):
            return
        outputs = tensors_of(output)
        if is_in_backward():  # with reentrant checkpointing gradients come through here only
            self._hook(Visit(self._names[module], module, *self._place, self._order, None), outputs, of_input=False)
            return
        while self._open and self._open[-1].module is not module:
            self._open.pop()  # calls that an error has ended
        if self._open:
            visit = self._open.pop()
            self._end(visit, outputs)
            self._hook(visit, outputs, of_input=False)

    def _begin(self, name: str, module: Any, inputs: Any) -> Visit:
        self._order += 1
        caller = self._open[-1] if self._open else None
        visit = Visit(name, module, *self._place, self._order, caller, tensors_of(inputs))
        with _without_autocast(visit.inputs):
            self.entered(visit)
        self._hook(visit, visit.inputs, of_input=True)
        return visit

    def _end(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        self._order += 1
        visit.order = self._order
        with _without_autocast(outputs):
            self.left(visit, outputs)
        visit.inputs = ()

    def _hook(self, visit: Visit, tensors: Sequence[torch.Tensor], of_input: bool) -> None:
        for tensor in tensors:
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(partial(self._gradient, visit, of_input))

    def _gradient(self, visit: Visit, of_input: bool, grad: torch.Tensor) -> None:
        if self.attached:
            self._order += 1
            with _without_autocast([grad]):
                self.gradient(visit, of_input, grad, self._order)


@contextmanager
def eager(parts: EngineParts) -> Iterator[None]:
    """A scope in which compiled modules run uncompiled."""
    if parts.division.compiled or any(map(is_compiled, parts.model.modules())):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextmanager
def _without_autocast(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What is computed with `tensors` is not cast, and no part of a graph."""
    device = tensors[0].device.type if tensors else "cpu"
    with torch.no_grad(), torch.autocast(device, enabled=False):
        yield
