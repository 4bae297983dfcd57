"""Saves state that differs between ranks: random numbers, and objects that the loop attached."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import InputError
from ..parallel.mesh import ParallelContext
from ..parallel.rng import model_seed, random_state, set_random_state

if TYPE_CHECKING:
    from ..engine.parallelize import ParallelModel


class Stateful(Protocol):
    """An object with a state dict of plain values and tensors."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> Any: ...


_Calls = tuple[Callable[[], Mapping[str, Any]], Callable[[Any], object]]
"""The functions that return the state of an object and that restore it."""


class AttachedState:
    """The objects attached with `Engine.attach`, by name, and loaded state whose object is not attached yet."""

    def __init__(self) -> None:
        self._calls: dict[str, _Calls] = {}
        self._unclaimed: dict[str, Any] = {}

    def attach(self, name: str, holder: Stateful | dict[str, Any]) -> None:
        """`Engine.attach`."""
        if name in self._calls:
            raise InputError(f"engine.attach({name!r}, ...): the name is taken; choose another, or call engine.detach")
        if isinstance(holder, dict):
            calls: _Calls = holder.copy, holder.update
        else:
            calls = holder.state_dict, holder.load_state_dict
        if name in self._unclaimed:
            calls[1](self._unclaimed[name])
            del self._unclaimed[name]
        self._calls[name] = calls

    def detach(self, name: str, keep: bool) -> None:
        """`Engine.detach`."""
        get, _ = self._calls.pop(name)
        if keep:
            self._unclaimed[name] = copy.deepcopy(dict(get()))

    def state_dict(self) -> dict[str, Any]:
        """The states by name; loaded state whose object is not attached is saved again."""
        return self._unclaimed | {name: dict(get()) for name, (get, _) in self._calls.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Yields a line for each object without saved state, which keeps its present state."""
        self._unclaimed = dict(state)
        for name, (_, load) in self._calls.items():
            if name in self._unclaimed:
                load(self._unclaimed.pop(name))
            else:
                yield f"it has no state of {name!r} (engine.attach), which stays unchanged"


# -- random numbers ----------------------------------------------------------------------------------------------------


def rank_random(context: ParallelContext, parallel_model: ParallelModel) -> dict[str, Any]:
    """All random numbers of this rank."""
    return random_state(context.device) | {
        "rank": context.rank,
        "model": None if parallel_model.random is None else parallel_model.random.state,
        "host": parallel_model.host_random.state,
    }


def set_rank_random(state: Mapping[str, Any], context: ParallelContext, parallel_model: ParallelModel) -> None:
    """Restore the random state that the same rank saved. (Another rank's would repeat its dropout.)"""
    set_random_state(state, context.device)
    if parallel_model.random is not None and state["model"] is not None:  # older checkpoints of data ranks have none
        parallel_model.random.state = state["model"].cpu()
        parallel_model.host_random.state = state["host"]


def reseed(seed: int, context: ParallelContext, parallel_model: ParallelModel) -> None:
    """Seed the model's random numbers again: on several ranks its separate sequence, as initialize does from the
    config's seed; in one process those of the GPU. (The CPU's also decide the order of the data.)"""
    if parallel_model.random is not None:
        own_seed = model_seed(seed, context, parallel_model.own_rng_axes)
        parallel_model.random.state = torch.Generator(context.device).manual_seed(own_seed).get_state()
        parallel_model.host_random.seed, parallel_model.host_random.state = model_seed(seed, context), None
    elif context.device.type == "cuda":
        torch.cuda.manual_seed(model_seed(seed, context))
