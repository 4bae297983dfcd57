"""What a loop does with the model and the optimizer that it gave, where the engine's own calls are meant.

A copy of the model (deepcopy for an average of its weights, torch.save) is guarded no more.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn, optim

from ..amp.recipe import Recipe
from ..division import Division
from ..log import get_logger
from .cycle import GradientCycle

_log = get_logger(__name__)

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_MODULE_CALLS = sys.modules[nn.Module.__module__].__file__

Remove = Callable[[], None]


def guard(
    model: nn.Module,
    optimizer: optim.Optimizer,
    cycle: GradientCycle,
    recipe: Recipe,
    device: torch.device,
    division: Division,
) -> Iterator[Remove]:
    """Put the guards on `model`, which is on `device`, and `optimizer`. Yields what takes each of them off."""
    if "zero_grad" not in vars(model) and type(model).zero_grad is nn.Module.zero_grad:
        model.zero_grad = ZeroGrad(model, cycle)  # type: ignore[method-assign]
        yield lambda: vars(model).pop("zero_grad", None)
    if division.cut is None and (recipe.autocast or recipe.param_dtype or recipe.output_dtype):
        yield model.register_forward_pre_hook(DirectCall(recipe, device)).remove  # stages refuse it themselves
    if division.tensor is not None or division.cut is not None or division.sharded is not None:
        yield model.register_state_dict_pre_hook(Parts(_MODEL_PARTS)).remove
    if division.divides:
        yield optimizer.register_state_dict_pre_hook(Parts(_OPTIMIZER_PARTS)).remove


class ZeroGrad:
    """`model.zero_grad`, which does nothing inside an accumulation cycle, as `optimizer.zero_grad`."""

    def __init__(self, model: nn.Module, cycle: GradientCycle) -> None:
        self._model = model
        self._cycle = cycle

    def __call__(self, set_to_none: bool = True) -> None:
        if not self._cycle.begun:
            nn.Module.zero_grad(self._model, set_to_none)
            self._cycle.clear()

    def __reduce__(self) -> Any:  # the copy's own: what is copied with it resolves to the copy
        return functools.partial, (nn.Module.zero_grad, self._model)


class _Hook:
    """Says something once, where the user's code makes a call of torch that it is put on."""

    def __init__(self) -> None:
        self._told = False

    def __reduce__(self) -> Any:
        return _no_hook, ()


class DirectCall(_Hook):
    """A forward pre-hook that tells of `model(x)` in training. (Compiled code leaves it out.)"""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        super().__init__()
        self._recipe = recipe
        self._kind = device.type

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._recipe.autocast and torch.is_autocast_enabled(self._kind):
            return  # the engine's own calls, and those within engine.autocast()
        if torch.compiler.is_compiling() or self._told or not (module.training and torch.is_grad_enabled()):
            return
        if _is_own_call() or _is_within_module() or torch.jit.is_tracing():
            return
        self._told = True
        recipe, dtype = self._recipe, str(self._recipe.compute_dtype).removeprefix("torch.")
        does = (
            f"its inputs are not cast to {dtype}, which its weights are in, nor its outputs back"
            if recipe.param_dtype is not None
            else f"it computes in float32, and not in {dtype} as the config says"
        )
        own = "" if recipe.param_dtype is not None else ", or call it within `with engine.autocast():`"
        _log.warning(
            "the model itself was called in training, in place of the engine: %s. Write engine(x) in place of "
            "model(x)%s",
            does,
            own,
            ranks=None,
        )


_MODEL_PARTS = (
    "model.state_dict() has this rank's part of the model only, which is divided over the ranks; for the whole "
    "model's weights call engine.save_weights(path), and to go on from there engine.save(path), on every rank"
)
_OPTIMIZER_PARTS = (
    "optimizer.state_dict() has this rank's part of the optimizer's state only, which is divided over the ranks; to "
    "save all of it call engine.save(path), on every rank, and engine.load(path) to go on from there"
)


class Parts(_Hook):
    """A pre-hook of `state_dict` that tells what is missing there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def __call__(self, *_: Any) -> None:
        if not self._told and not _is_own_call():
            self._told = True
            _log.warning("%s", self._text)


def _no_hook() -> Callable[..., None]:
    return _ignore


def _ignore(*_: Any) -> None:
    """In place of a hook, in a copy."""


def _is_own_call() -> bool:
    """Whether halfmesh made the call that a hook is run for, and not the user's code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != _MODULE_CALLS and not file.startswith(_TORCH):  # the first to spare calls in each step
            return file.startswith(_OURS)
        frame = frame.f_back
    return False


def _is_within_module() -> bool:
    """Whether the module that a hook is run for was called by the forward of another one."""
    frame: FrameType | None = sys._getframe(2)
    calls, was_call = 0, False
    while frame is not None:
        is_call = frame.f_code.co_filename == _MODULE_CALLS
        calls += is_call and not was_call
        was_call, frame = is_call, frame.f_back
    return calls > 1
