"""Warnings, each told once, of mistakes in a loop that would train silently otherwise."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..amp.recipe import Recipe
from ..amp.step_result import StepResult
from ..errors import shorten
from ..parallel.comm import same_on_ranks
from ..parallel.mesh import ParallelContext
from ..parallel.reducer import STATISTICS
from ..utils.engine_hook import EngineHook, Hooks
from ..utils.log import get_logger
from ..utils.tensors import tensors_of
from ..utils.torch_private import edit_stamp, grad_hooks

if TYPE_CHECKING:
    from ..data.loader import EngineDataLoader

_log = get_logger(__name__)

_HOOKED = (
    "hooks on %s see gradients multiplied by the loss scale, where a clamp or noise does not do what it does in fp32. "
    "Use bf16, which has no loss scale; clip with clip_grad_norm in the config; or multiply the bounds by "
    "engine.loss_scale"
)
_COUNTED = (
    "the loop calls engine.step() once per %d batches, but gradient_accumulation=%d already counts batches, so updates "
    "average too many. Call engine.step() after every batch; or set gradient_accumulation=1, and divide the loss by %d"
)
_SAME = (
    "all %d data ranks got the same inputs in the first update: they seem to train on the same batches. Pass your "
    "DataLoader to initialize, which shards it; or shard the data yourself, or seed it by rank (engine.context.dp_rank)"
)
_UNLIKE = (
    "the buffers %s change during training on each data rank, so they may differ between ranks. halfmesh averages only "
    "running_mean and running_var; all-reduce other buffers in the model"
)
_SLOW = (
    "matrix products run in fp32 without TF32, at about an eighth of its speed. "
    "torch.set_float32_matmul_precision('high'), before initialize, turns TF32 on, which rounds factors to 10 bits of "
    "mantissa; bf16 is faster still"
)


def tell_of_slow_products(recipe: Recipe, device: torch.device) -> None:
    """Log it if the GPU has TF32, and fp32 products do not use it: torch's default."""
    uses = recipe.compute_dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
    if not uses and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0):
        _log.info("advice: %s", _SLOW)


def tell_of_hooks(model: nn.Module, ranks: tuple[int, ...] | None) -> None:
    """Warn, on `ranks`, of the user's hooks that see gradients under a loss scale."""
    modules = ((name or "the model", module) for name, module in model.named_modules())
    names = [name for name, x in (*model.named_parameters(), *modules) if any(map(_is_users, grad_hooks(x)))]
    if names:
        _log.warning(_HOOKED, shorten(names), ranks=ranks)


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith(("halfmesh.", "torch.distributed."))


@dataclass(eq=False, repr=False)
class CountedBatches(EngineHook):
    """Warns of a loop that accumulates by itself: `step` came after several batches, for the second time. Ends with
    that, or with two steps in turn that came after one batch.

    Several losses of one batch are no batches: one is counted for each that `engine.dataloader` gave or, where that is
    not iterated, for each training forward with a backward.
    """

    _model: nn.Module
    _loader: EngineDataLoader | None
    _length: int
    _hooks: Hooks
    _is_new_forward = False
    _batches = _late_steps = _timely_steps = 0

    def before_forward(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_new_forward |= self._model.training

    def after_backward(self, loss: Any) -> None:
        loader = self._loader
        self._batches += loader.is_untouched if loader is not None and loader.runs else self._is_new_forward
        self._is_new_forward = False

    def before_step(self) -> None:
        batches, self._batches = self._batches, 0
        self._late_steps += batches > 1
        self._timely_steps = 0 if batches > 1 else self._timely_steps + 1
        if self._late_steps == 2 or self._timely_steps == 2:
            self._hooks.remove(self)
        if self._late_steps == 2:
            _log.warning(_COUNTED, batches, self._length, batches)


@dataclass(eq=False, repr=False)
class SameInputs(EngineHook):
    """Warns after the first update if the user's own loader gives all data ranks the same batches."""

    _model: nn.Module
    _context: ParallelContext
    _hooks: Hooks
    _inputs: Any = None

    def before_forward(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trains = self._model.training and torch.is_grad_enabled()
        if trains and (method is None or self._inputs is None):  # other methods may be given the same, as prompts are
            self._inputs = args, kwargs

    def after_step(self, result: StepResult) -> None:
        self._hooks.remove(self)
        inputs = tensors_of(self._inputs)
        if same_on_ranks(inputs, self._context.dp_group) and inputs:
            _log.warning(_SAME, self._context.dp_size)


class ChangedBuffers(EngineHook):
    """Warns after the second update of buffers that have changed since the first, differently on each data rank."""

    def __init__(self, model: nn.Module, hooks: Hooks) -> None:
        averaged = (*STATISTICS, "num_batches_tracked")
        self._buffers = {name: b for name, b in model.named_buffers() if name.rpartition(".")[2] not in averaged}
        self._hooks = hooks
        self._stamps: dict[str, tuple[int, int]] = {}

    def after_step(self, result: StepResult) -> None:
        before, self._stamps = self._stamps, {name: edit_stamp(buffer) for name, buffer in self._buffers.items()}
        if before or not self._buffers:
            self._hooks.remove(self)
        if changed := [name for name, stamp in before.items() if stamp != self._stamps[name]]:
            _log.warning(_UNLIKE, shorten(changed))
