"""Catches calls on the user's own model and optimizer where the engine's should be used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.utils.hooks import RemovableHandle

from ..amp.recipe import Recipe
from ..utils.log import get_logger
from ..utils.tensors import dtype_name
from .parallelize import ParallelModel

_log = get_logger(__name__)

_PARTS = (
    "%s.state_dict() has this rank's part of the %s only, which is sharded over the ranks; to save all of it call "
    "engine.save(path) on every rank, or engine.save_weights(path) for the model's weights alone, before the engine is "
    "closed; engine.close(restore=True) gives all of it back on every rank"
)


class ModelGuard:
    """Hooks on `model`, which is on `device`, and `optimizer`, until `remove`. Copies of the model have none."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        recipe: Recipe,
        device: torch.device,
        division: ParallelModel,
    ) -> None:
        self.own_calls = 0
        """Above 0 while the engine itself calls the model or the optimizer."""
        self._removers: list[Callable[[], Any]] = []
        self._warnings: list[RemovableHandle] = []  # of state dicts that hold only this rank's shards
        if division.plans.partition is None and (recipe.autocast or recipe.param_dtype or recipe.output_dtype):
            warn = _DirectCall(self, recipe, device)  # stages refuse it themselves
            self._removers.append(model.register_forward_pre_hook(warn).remove)
        if division.divides_model:
            self._warnings.append(model.register_state_dict_pre_hook(_PartialState(self, "model")))
        if division.divides:
            self._warnings.append(optimizer.register_state_dict_pre_hook(_PartialState(self, "optimizer")))

    def own_call(self) -> ModelGuard:
        """A scope in which the engine calls model and optimizer."""
        return self

    def __enter__(self) -> None:
        self.own_calls += 1

    def __exit__(self, *_: object) -> None:
        self.own_calls -= 1

    def remove(self, warnings: bool) -> None:
        """Remove the hooks; those that warn of sharded state dicts only with `warnings`."""
        for remove in self._removers:
            remove()
        for hook in self._warnings if warnings else ():
            hook.remove()
        self._removers, self._warnings = [], []


class _Warning:
    """A hook that warns once of a call that the engine did not make."""

    def __init__(self, guard: ModelGuard) -> None:
        self._guard = guard
        self._has_warned = False

    def __reduce__(self) -> Any:  # a copy of the model has a hook that does nothing
        return functools.partial, (_do_nothing,)


class _DirectCall(_Warning):
    """Before a forward: warns of `model(x)` in training. (Compiled code leaves it out.)"""

    def __init__(self, guard: ModelGuard, recipe: Recipe, device: torch.device) -> None:
        super().__init__(guard)
        self._autocast_on = device.type if recipe.autocast else None
        dtype = dtype_name(recipe.compute_dtype)
        if recipe.param_dtype is not None:
            does, or_else = f"its inputs are not cast to {dtype}, which its weights are in, nor its outputs back", ""
        else:
            does = f"it computes in float32, and not in {dtype} as the config says"
            or_else = ", or call it within `with engine.autocast():`"
        self._text = f"{does}. Write engine(x) in place of model(x){or_else}"

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or self._has_warned or self._guard.own_calls:
            return
        if torch.jit.is_tracing() or not (module.training and torch.is_grad_enabled()):
            return
        if self._autocast_on is None or not torch.is_autocast_enabled(self._autocast_on):
            self._has_warned = True
            _log.warning("the model itself was called in training, in place of the engine: %s", self._text, ranks=None)


class _PartialState(_Warning):
    """Before `state_dict`: warns of what is missing in it."""

    def __init__(self, guard: ModelGuard, what: str) -> None:
        super().__init__(guard)
        self._what = what

    def __call__(self, *_: Any) -> None:
        if not self._has_warned and not self._guard.own_calls:
            self._has_warned = True
            _log.warning(_PARTS, self._what, self._what)


def _do_nothing(*_: Any) -> None:
    """Replaces a hook in a copy of the model."""
