"""A training run, tensor by tensor: hooks on modules, gradients and weights hand it to a sink; and what a
reference writes to a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..amp.step_result import StepResult
from ..debug.probes import Probes, Visit
from ..engine.engine import Engine
from ..nn.loss import CHUNK
from ..parallel.shard_spec import Placement, whole
from ..utils.optimizer_state import parts_of
from ..utils.tensors import count_rows, map_named, parameter_names, position_names
from ..utils.torch_private import without_functions


class Key(NamedTuple):
    """Names a tensor of a run.

    Attributes:
        update: which update it belongs to.
        call: which call of the model within it; of a layout which chunk of the update's batch.
        what: input, output or grad_output of a module; gradient, begin (before the update) or update (after it) of a
            parameter; buffer.
        name: of the module, parameter or buffer.
        nth: how often the call had called the module before.
        slot: which argument, or which of the outputs.
    """

    update: int
    call: int
    what: str
    name: str
    nth: int = 0
    slot: str = ""


class Sink(Protocol):
    """Takes what a run computes, in time order."""

    names: dict[str, list[str]]
    """By module, what the arguments of its forward are called in the whole model."""
    figures: dict[tuple[int, int, str], Any]
    """By update, call and kind: loss, or norm, skipped, scale and lr of an update."""

    def begin(self, engine: Engine) -> None:
        """From now on this engine computes; before, a plain loop did."""

    def tensor(self, key: Key, tensor: torch.Tensor, microbatch: int) -> None:
        """An activation or its gradient."""

    def parameter(self, key: Key, tensor: torch.Tensor, placement: Placement) -> None:
        """This rank's part of a parameter, its gradient, or a buffer."""


class Store:
    """The tensors of a run in time order, with what else is known of it; written once to a file, and read by mmap.

    Attributes:
        tensors: not to be written.
        figures, names: see `Sink`.
        callers: for a module's call (name and nth) the name of the module that called it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.tensors: dict[Key, torch.Tensor] = {}
        self.figures: dict[tuple[int, int, str], Any] = {}
        self.names: dict[str, list[str]] = {}
        self.callers: dict[tuple[str, int], str | None] = {}
        if path is not None:
            vars(self).update(torch.load(path, mmap=True, weights_only=False))

    def write(self, path: Path) -> None:
        """The run has ended."""
        torch.save(vars(self), path)

    def begin(self, engine: Engine) -> None:
        """See `Sink`."""

    def tensor(self, key: Key, tensor: torch.Tensor, microbatch: int = 0) -> None:
        """See `Sink`."""
        self.tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()

    def parameter(self, key: Key, tensor: torch.Tensor, placement: Placement) -> None:
        """See `Sink`; of one process, which holds all of it."""
        self.tensor(key, tensor.reshape(placement.shape))


class Recorder(Probes):
    """Hands what the modules of a model compute to a sink."""

    def __init__(self, model: nn.Module, sink: Sink, *more: Any) -> None:
        super().__init__(model, *more)
        self.sink = sink
        self.update = self.call = 0
        self._counts: Counter[tuple[str, int]] = Counter()

    def begin(self, update: int, call: int) -> None:
        """A call of the model, or of what makes a chunk of the batch, begins."""
        self.update, self.call = update, call
        self._counts.clear()

    @torch.no_grad()
    def weights(self, what: str, update: int) -> None:
        """Record weights, and after an update the buffers."""
        for name, held, placement in self.held(what):
            if held.is_floating_point():
                self.sink.parameter(Key(update, 0, what, name), held.detach(), placement)
        first = {} if self._parallel is None else self._parallel.first_names(self._model)
        for name, buffer in self._model.named_buffers() if what == "update" else ():
            if buffer.is_floating_point():
                self.sink.parameter(Key(update, 0, "buffer", first.get(name, name)), buffer, whole(buffer.shape))

    def held(self, what: str) -> Iterator[tuple[str, torch.Tensor, Placement]]:
        """Names, parts of parameters, and which these are."""
        return ((name, param, whole(param.shape)) for name, param in self._model.named_parameters())

    def entered(self, visit: Visit) -> None:
        """See `Probes`."""
        caller = visit.caller
        if any(hasattr(x, CHUNK) for x in visit.inputs) or (caller is not None and caller.nth is None):
            return
        visit.nth = nth = self._counts[visit.name, visit.microbatch]
        self._counts[visit.name, visit.microbatch] += 1
        args, kwargs = visit.given
        if isinstance(self.sink, Store):
            self.sink.names.setdefault(visit.name, parameter_names(visit.module))
            self.sink.callers[visit.name, nth] = None if caller is None else caller.name
        names = position_names(self.sink.names.get(visit.name, []), len(args))

        def given(slot: str, tensor: torch.Tensor) -> torch.Tensor:
            self._hand("input", visit, slot.removeprefix("."), tensor)
            return tensor

        map_named(given, {**dict(zip(names, args, strict=True)), **kwargs}, "")

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        """See `Probes`."""
        for slot, tensor in enumerate(outputs) if visit.nth is not None else ():
            self._hand("output", visit, str(slot), tensor)

    def _hook(self, visit: Visit, tensors: Sequence[torch.Tensor]) -> None:
        given = set(map(id, visit.inputs))
        for slot, tensor in enumerate(tensors):
            if id(tensor) in given:
                continue  # another module made it, whose gradient has the parts of all that use it, in other stages too
            if visit.nth is not None and tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(partial(self._hand, "grad_output", visit, str(slot)))

    def _hand(self, what: str, visit: Visit, slot: str, tensor: torch.Tensor) -> None:
        if self.attached and tensor.is_floating_point() and tensor.layout is torch.strided:
            key = Key(self.update, self.call, what, visit.name, visit.nth or 0, slot)
            tensor = getattr(tensor, "to_local", lambda: tensor)()
            with without_functions():  # modes that are open here are for the model, and make each function slow
                self.sink.tensor(key, tensor.detach(), visit.microbatch)


class EngineRecorder(Recorder):
    """Hands all that an engine computes to a sink; use it in `engine._hooks.added`."""

    def __init__(self, engine: Engine, sink: Sink) -> None:
        super().__init__(engine.model, sink, engine._parallel, engine._executor.stages)
        self._engine, self._state = engine, engine._state
        self._position, self._losses = -1, list[Any]()
        sink.begin(engine)

    def attach(self) -> None:
        """Put the hooks on, and record the weights with which training begins."""
        super().attach()
        self._scope.callback(setattr, self._engine._update, "step", self._engine._update.step)
        self._engine._update.step = partial(self._step, self._engine._update.step)  # type: ignore[method-assign]
        self.weights("update", -1)

    def finish(self, bends: bool) -> None:
        """The run has ended; `bends`: see `Undropped`."""
        self.detach()
        self.sink.figures[0, 0, "bends"] = bends
        self.sink.figures[0, 0, "rounds"] = any(
            type(one).__name__ == "Muon" for one in parts_of(self._engine.optimizer)
        )

    def before_forward(self, method: Any, args: Any, kwargs: Any) -> None:
        """See `EngineHook`."""
        index, context = self._engine._accumulation.index, self._engine.context
        if self._engine.model.training and index != self._position:
            if self._position < 0 and self.update:
                self.weights("begin", self.update)
            self._position = index
            self.begin(self.update, index * context.dp_size + context.dp_rank)
            self.sink.figures[self.update, self.call, "rows"] = count_rows((args, kwargs))

    def before_backward(self, loss: Any) -> None:
        """See `EngineHook`."""
        self._losses.append((self.call, loss))

    def _step(self, step: Any, divisor: Any = 1.0) -> StepResult:
        """The gradients of an update are complete: unscaled, and before clipping."""
        update, parallel_model = self._engine._update, self._engine._parallel
        names = {id(shard): name for shard, name in self._state.names()}
        _, total = update.loss_scales.grad_divisor(divisor)
        for shard, grad in update.gradients().items():
            grad = grad.to_dense() if grad.layout is not torch.strided else grad
            grad = grad.double() if total is None else grad.double() / total.to(grad.device)
            key = Key(self.update, 0, "gradient", names[id(shard)])
            self.sink.parameter(key, grad, parallel_model.placement(shard))
        result: StepResult = step(divisor)
        return result

    def after_step(self, result: StepResult) -> None:
        """See `EngineHook`."""
        for call, loss in self._losses:
            self.sink.figures[self.update, call, "loss"] = loss_value(loss)
        for what in ("skipped", "loss_scale", "grad_norm", "lr"):
            self.sink.figures[self.update, 0, what] = getattr(result, what)
        self.weights("update", self.update)
        self.update, self._position, self._losses = self.update + 1, -1, []

    def held(self, what: str) -> Iterator[tuple[str, torch.Tensor, Placement]]:
        """The parameters that the optimizer holds; or, to "begin" with, the weights that the model computes with. (A
        state dict would let fsdp free what it gathered.)"""
        for shard, name in self._state.names():
            held = self._engine._update.master_weights.value(shard)
            if what == "begin":
                shard = shard if shard.source is None or shard.original is not None else shard.source
                held = shard.param
            yield name, held, self._engine._parallel.placement(shard)


def loss_value(loss: Any) -> tuple[float, float]:
    """Sum and weight of a loss, of which the quotient is the loss."""
    loss = getattr(loss, "value", lambda: loss)() if not isinstance(loss, torch.Tensor) else loss
    parts = loss if isinstance(loss, (tuple, list)) else (loss, 1.0)
    value, weight = (part.detach() if isinstance(part, torch.Tensor) else part for part in parts)
    return float(value), float(weight)
