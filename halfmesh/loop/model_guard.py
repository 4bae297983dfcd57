"""Calls of the user's loop on its own model and optimizer, where the engine's calls are meant.

A copy of the model (deepcopy for an average of its weights, torch.save) is guarded no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from ..amp.recipe import Recipe
from ..division import Division
from ..log import get_logger
from .accumulation import Accumulation

_log = get_logger(__name__)

_MODEL_PARTS = (
    "model.state_dict() has this rank's part of the model only, which is divided over the ranks; for the whole "
    "model's weights call engine.save_weights(path), and to go on from there engine.save(path), on every rank"
)
_OPTIMIZER_PARTS = (
    "optimizer.state_dict() has this rank's part of the optimizer's state only, which is divided over the ranks; to "
    "save all of it call engine.save(path), on every rank, and engine.load(path) to go on from there"
)


class ModelGuard:
    """Hooks on `model`, which is on `device`, and `optimizer`, until `remove`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        accumulation: Accumulation,
        recipe: Recipe,
        device: torch.device,
        division: Division,
    ) -> None:
        self.own_calls = 0
        """Above 0 the engine makes the calls that come, and not the user's loop."""
        self._removers: list[Callable[[], Any]] = []
        if "zero_grad" not in vars(model) and type(model).zero_grad is nn.Module.zero_grad:
            model.zero_grad = ZeroGrad(model, accumulation)  # type: ignore[method-assign]
            self._removers.append(lambda: vars(model).pop("zero_grad", None))
        if division.cut is None and (recipe.autocast or recipe.param_dtype or recipe.output_dtype):
            warn = DirectCall(self, recipe, device)  # stages refuse it themselves
            self._removers.append(model.register_forward_pre_hook(warn).remove)
        if division.tensor is not None or division.cut is not None or division.sharded is not None:
            self._removers.append(model.register_state_dict_pre_hook(PartialState(self, _MODEL_PARTS)).remove)
        if division.divides:
            self._removers.append(optimizer.register_state_dict_pre_hook(PartialState(self, _OPTIMIZER_PARTS)).remove)

    def own_call(self) -> ModelGuard:
        """A scope in which the engine calls model and optimizer."""
        return self

    def __enter__(self) -> None:
        self.own_calls += 1

    def __exit__(self, *_: object) -> None:
        self.own_calls -= 1

    def remove(self) -> None:
        """Take the hooks off."""
        for remove in self._removers:
            remove()


class ZeroGrad:
    """`model.zero_grad`, which does nothing inside an accumulation cycle, as `optimizer.zero_grad`."""

    def __init__(self, model: nn.Module, accumulation: Accumulation) -> None:
        self._model = model
        self._accumulation = accumulation

    def __call__(self, set_to_none: bool = True) -> None:
        if not self._accumulation.in_progress:
            nn.Module.zero_grad(self._model, set_to_none)
            self._accumulation.clear()

    def __reduce__(self) -> Any:  # the copy's own: what is copied with it resolves to the copy
        return functools.partial, (nn.Module.zero_grad, self._model)


class _Hook:
    """Warns once of a call of torch that the user's code makes."""

    def __init__(self, guard: ModelGuard) -> None:
        self._guard = guard
        self._has_warned = False

    def __reduce__(self) -> Any:  # a copy of the model has a hook that does nothing
        return _make_no_hook, ()


class DirectCall(_Hook):
    """A forward pre-hook that warns of `model(x)` in training. (Compiled code leaves it out.)"""

    def __init__(self, guard: ModelGuard, recipe: Recipe, device: torch.device) -> None:
        super().__init__(guard)
        self._recipe = recipe
        self._device_type = device.type

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or self._has_warned or self._guard.own_calls:
            return
        if torch.jit.is_tracing() or not (module.training and torch.is_grad_enabled()):
            return
        if self._recipe.autocast and torch.is_autocast_enabled(self._device_type):
            return  # within engine.autocast()
        self._has_warned = True
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


class PartialState(_Hook):
    """A pre-hook of `state_dict` that warns of what is missing in it."""

    def __init__(self, guard: ModelGuard, text: str) -> None:
        super().__init__(guard)
        self._text = text

    def __call__(self, *_: Any) -> None:
        if not self._has_warned and not self._guard.own_calls:
            self._has_warned = True
            _log.warning("%s", self._text)


def _make_no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """In place of a hook, in a copy."""
