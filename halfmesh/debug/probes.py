"""Adds hooks to the modules that see inputs, outputs and their gradients in a training step, and measures tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..utils.engine_hook import EngineHook
from ..utils.tensors import tensors_of
from ..utils.torch_private import is_compiled, is_in_backward

if TYPE_CHECKING:
    from ..engine.parallelize import ParallelModel

CRITERION = "the criterion"


@dataclass(eq=False)
class Visit:
    """One call of a module, or of the criterion.

    Attributes:
        name: the name of the module in the full model, or `CRITERION`.
        stage: the pipeline stage.
        microbatch: the microbatch.
        order: the number of calls that began or ended on this rank before it.
        caller: the module whose forward called it. None for the outermost.
        given: its arguments while it runs, positional and named.
        nth: the number of the module's call, if a subclass counts them.
    """

    name: str
    module: nn.Module
    stage: int
    microbatch: int
    order: int
    caller: Visit | None
    inputs: Sequence[torch.Tensor] = ()
    given: tuple[Sequence[Any], Mapping[str, Any]] = (), MappingProxyType({})
    nth: int | None = None

    @property
    def label(self) -> str:
        """For messages: "'1.scores' (Scores)"."""
        if self.name == CRITERION:
            return CRITERION
        return f"{repr(self.name) if self.name else 'the model'} ({type(self.module).__name__})"


@dataclass(eq=False)
class Criterion:
    """The criterion of an engine. While probes watch a function, a module stands in its place."""

    function: Callable[..., Any] | None


@dataclass(eq=False, repr=False)
class Probes(EngineHook):
    """Between `attach` and `detach`, calls the methods below for training forwards and their backwards.

    Recomputation by activation checkpointing does not count again. Compiled modules run uncompiled, as hooks need.

    Attributes:
        _parallel: the parallelism of `_model`, or None.
        _stages: the pipeline stages on this rank.
        _criterion: the criterion, which is also watched.
        attached: True if the hooks are registered.
        _place: the current stage and microbatch.
    """

    _model: nn.Module
    _parallel: ParallelModel | None = None
    _stages: Collection[nn.Module] = ()
    _criterion: Criterion | None = None
    attached: bool = False
    _names: dict[nn.Module, str] = field(default_factory=dict)
    _scope: ExitStack = field(default_factory=ExitStack)
    _order: int = 0
    _place: tuple[int, int] = (0, 0)
    _open: list[Visit] = field(default_factory=list)

    # -- to override -------------------------------------------------------------------------------------------

    def entered(self, visit: Visit) -> None:
        """Called when a call begins; `visit.inputs` are its tensor arguments."""

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        """Called when it ends."""

    def gradient(self, visit: Visit, grad: torch.Tensor, order: int) -> None:
        """Called with the gradient of one of its outputs. For a tensor that several calls return, once for each, the
        innermost first."""

    # -- hooks -------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register the hooks."""
        self.attached, scope, held = True, self._scope, self._criterion
        partition = None if self._parallel is None else self._parallel.plans.partition
        not_called = set() if partition is None else {module for _, module in partition.not_called(self._model)}
        self._names = {module: name for name, module in self._model.named_modules() if module not in not_called}
        if held is not None and held.function is not None:
            if not isinstance(held.function, nn.Module):
                module = nn.Module()
                module.forward = held.function
                scope.callback(setattr, held, "function", held.function)
                held.function = module
            self._names[held.function] = CRITERION
        if (self._parallel is not None and self._parallel.compiled) or any(map(is_compiled, self._model.modules())):
            scope.enter_context(torch.compiler.set_stance("force_eager"))
        for stage in self._stages:
            scope.callback(stage.register_forward_pre_hook(self._begin_stage, with_kwargs=True).remove)
        for module in self._names:
            scope.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            scope.callback(module.register_forward_hook(self._leave).remove)

    def detach(self) -> None:
        """Remove the hooks."""
        self._scope.close()
        self.attached, self._names, self._open = False, {}, []

    def _begin_stage(self, stage: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._place = stage.index, int(kwargs["index"])

    @torch.compiler.disable
    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        is_trained = torch.is_grad_enabled() or self._open  # within a call, checkpointing may switch gradients off
        if not (self._model.training and is_trained) or is_in_backward():
            return
        self._order += 1
        caller = self._open[-1] if self._open else None
        inputs, given = tensors_of([args, kwargs]), (args, kwargs)
        visit = Visit(self._names[module], module, *self._place, self._order, caller, inputs, given)
        self._open.append(visit)
        self.entered(visit)

    @torch.compiler.disable
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (self.attached and self._model.training):
            return
        outputs = tensors_of(output)
        if is_in_backward():  # with reentrant checkpointing gradients come through here only
            self._hook(Visit(self._names[module], module, *self._place, self._order, None), outputs)
            return
        while self._open and self._open[-1].module is not module:
            self._open.pop()  # calls that an error has ended
        if self._open:
            visit = self._open.pop()
            self._order += 1
            visit.order = self._order
            self.left(visit, outputs)
            self._hook(visit, outputs)
            visit.inputs, visit.given = (), ((), {})

    def _hook(self, visit: Visit, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(partial(self._gradient, visit))

    def _gradient(self, visit: Visit, grad: torch.Tensor) -> None:
        if self.attached:
            self._order += 1
            self.gradient(visit, grad, self._order)


# -- statistics of tensors ---------------------------------------------------------------------------------------------

# Elements that are measured at a time: a copy of a full activation may not fit into memory.
_CHUNK = 2**24


@dataclass(frozen=True)
class TensorStats:
    """Counts of a tensor's elements. `subnormal` counts those that are not zero but below the smallest normal number of
    the dtype. `largest` is the largest finite magnitude."""

    dtype: torch.dtype | None = None
    count: int = 0
    inf: int = 0
    nan: int = 0
    zeros: int = 0
    subnormal: int = 0
    largest: float = 0.0

    def __add__(self, other: TensorStats) -> TensorStats:
        names = ("count", "inf", "nan", "zeros", "subnormal")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return TensorStats(self.dtype or other.dtype, **sums, largest=max(self.largest, other.largest))


@torch.no_grad()
def measure(tensor: torch.Tensor) -> TensorStats:
    """The statistics of this rank's shard of `tensor` (reads the device); no counts if it is not floating-point."""
    found = TensorStats(tensor.dtype)
    values = _values(tensor)
    for chunk in () if values is None else values.split(_CHUNK):
        size = chunk.abs()
        is_finite, is_tiny = size < math.inf, (size > 0) & (size < torch.finfo(chunk.dtype).tiny)
        counts = [count.sum().double() for count in (size == math.inf, size.isnan(), size == 0, is_tiny)]
        largest = torch.where(is_finite, size, torch.zeros_like(size)).max().double()
        inf, nan, zeros, tiny, most = torch.stack([*counts, largest]).tolist()
        found += TensorStats(tensor.dtype, chunk.numel(), int(inf), int(nan), int(zeros), int(tiny), most)
    return found


@torch.no_grad()
def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if this rank's shard of `tensor` holds no inf and no nan. Waits for the device."""
    values = _values(tensor)
    return values is None or bool(values.isfinite().all())


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements in one row; None if there are none in floating point."""
    tensor = getattr(tensor, "to_local", lambda: tensor)()  # a DTensor
    is_plain = tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.reshape(-1) if is_plain and tensor.numel() else None
