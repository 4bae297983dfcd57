"""Hooks through which a listener sees what goes into modules, what comes out, and the gradients of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..engine._torch import is_in_backward
from ..parallel.pipeline.stage import StageModule
from ..tensors import tensors_of

CRITERION = "the criterion"


@dataclass(eq=False)
class Visit:
    """One call of a module, or of the criterion.

    Attributes:
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


class Listener:
    """Is told what happens in a forward and a backward. Does nothing with it."""

    def entered(self, visit: Visit) -> None:
        """A call begins; `visit.inputs` are what it was given."""

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        """It ends."""

    def gradient(self, visit: Visit, of_input: bool, grad: torch.Tensor, order: int) -> None:
        """The gradient of one of its outputs, or inputs. One tensor may be several of those; they follow each other,
        with the same `grad`, from the one that made it to what used it."""

    def parameter_gradient(self, name: str, grad: torch.Tensor, order: int) -> None:
        """What one backward adds to the gradient of a parameter on this rank."""

    def complete_gradient(self, name: str, grad: torch.Tensor) -> None:
        """What of a parameter's gradient the optimizer steps with on this rank."""


class Probes:
    """A scope in which `listener` is told. What is computed again in backward counts once.

    Args:
        modules: those that are hooked, by name.
        params: parameters whose gradients are, by name.
        stages: of a pipeline.
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, str],
        params: Iterable[tuple[str, nn.Parameter]],
        stages: Iterable[StageModule],
        listener: Listener,
    ) -> None:
        self._modules = modules
        self._params = list(params)
        self._stages = list(stages)
        self._listener = listener
        self._order = 0
        self._place = 0, 0
        self._open: list[Visit] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Probes:
        add = self._handles.append
        for stage in self._stages:
            add(stage.register_forward_pre_hook(self._begin_stage, with_kwargs=True))
        for module in self._modules:
            add(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            add(module.register_forward_hook(self._leave))
        for name, param in self._params:
            add(param.register_hook(partial(self._parameter_gradient, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._open = [], []

    def watched(self, criterion: Callable[..., Any]) -> Callable[..., Any]:
        """`criterion`, of which the listener is told as of a module."""

        def call(*args: Any, **kwargs: Any) -> Any:
            visit = self._visit(CRITERION, criterion, [*args, kwargs])
            with _plainly(visit.inputs):
                self._listener.entered(visit)
            self._hook(visit, visit.inputs, of_input=True)
            value = criterion(*args, **kwargs)
            self._end(visit, tensors_of(value))
            return value

        call.forward = getattr(criterion, "forward", criterion)  # type: ignore[attr-defined]  # whose signature counts
        return call

    # -- hooks -------------------------------------------------------------------------------------------------

    def _begin_stage(self, stage: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert isinstance(stage, StageModule)
        self._place = stage.index, int(kwargs["index"])

    @torch.compiler.disable
    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if is_in_backward():
            return
        visit = self._visit(self._modules[module], module, [args, kwargs])
        self._open.append(visit)
        with _plainly(visit.inputs):
            self._listener.entered(visit)
        self._hook(visit, visit.inputs, of_input=True)

    @torch.compiler.disable
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs = tensors_of(output)
        if is_in_backward():  # with reentrant checkpointing gradients come through here only
            self._hook(Visit(self._modules[module], module, *self._place, self._order, None), outputs, of_input=False)
            return
        while self._open and self._open[-1].module is not module:
            self._open.pop()  # calls that an error has ended
        visit = self._open.pop() if self._open else self._visit(self._modules[module], module, args)
        self._end(visit, outputs)
        self._hook(visit, outputs, of_input=False)

    def _end(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        self._order += 1
        visit.order = self._order
        with _plainly(outputs):
            self._listener.left(visit, outputs)
        visit.inputs = ()

    def _visit(self, name: str, module: Any, inputs: Any) -> Visit:
        self._order += 1
        caller = self._open[-1] if self._open else None
        return Visit(name, module, *self._place, self._order, caller, tensors_of(inputs))

    def _hook(self, visit: Visit, tensors: Sequence[torch.Tensor], of_input: bool) -> None:
        for tensor in tensors:
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(partial(self._gradient, visit, of_input))

    def _gradient(self, visit: Visit, of_input: bool, grad: torch.Tensor) -> None:
        self._order += 1
        with _plainly([grad]):
            self._listener.gradient(visit, of_input, grad, self._order)

    def _parameter_gradient(self, name: str, grad: torch.Tensor) -> None:
        self._order += 1
        with _plainly([grad]):
            self._listener.parameter_gradient(name, grad, self._order)


@contextmanager
def _plainly(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What is computed with `tensors` is not cast, and no part of a graph."""
    device = tensors[0].device.type if tensors else "cpu"
    with torch.no_grad(), torch.autocast(device, enabled=False):
        yield
