"""State that differs between ranks: random numbers, and objects that the loop attached."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
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


Holder = Stateful | dict[str, Any]


def _state_of(holder: Holder) -> dict[str, Any]:
    return dict(holder if isinstance(holder, dict) else holder.state_dict())


def _load(holder: Holder, state: Any) -> None:
    holder.update(state) if isinstance(holder, dict) else holder.load_state_dict(state)


class AttachedState:
    """The objects attached with `Engine.attach`, by name, and loaded state whose object is not attached yet."""

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}
        self._unclaimed: dict[str, Any] = {}

    def attach(self, name: str, holder: Holder) -> None:
        """`Engine.attach`."""
        if name in self._holders:
            raise InputError(
                f"engine.attach({name!r}, ...): the name is taken by a {type(self._holders[name]).__name__}; give "
                "another one, or call engine.detach first"
            )
        if name in self._unclaimed:
            _load(holder, self._unclaimed[name])
            del self._unclaimed[name]
        self._holders[name] = holder

    def detach(self, name: str, keep: bool) -> None:
        """`Engine.detach`."""
        if name not in self._holders:
            names = ", ".join(self._holders) or "-"
            raise InputError(f"engine.detach({name!r}): nothing of that name is attached, only: {names}")
        holder = self._holders.pop(name)
        if keep:
            self._unclaimed[name] = copy.deepcopy(_state_of(holder))

    def state_dict(self) -> dict[str, Any]:
        """The states by name; loaded state whose object is not attached is saved again."""
        return self._unclaimed | {name: _state_of(holder) for name, holder in self._holders.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Yields a line for each object without saved state, which keeps its present state."""
        self._unclaimed = dict(state)
        for name, holder in self._holders.items():
            if name in self._unclaimed:
                _load(holder, self._unclaimed.pop(name))
            else:
                yield f"it has no state of {name!r} (engine.attach), which stays as it is"


# -- random numbers ----------------------------------------------------------------------------------------------------


def rank_random(context: ParallelContext, parallel_model: ParallelModel) -> dict[str, Any]:
    """All random numbers of this rank."""
    return random_state(context.device) | {
        "rank": context.rank,
        "model": None if parallel_model.random is None else parallel_model.random.state,
        "host": parallel_model.host_random.state,
    }


def set_rank_random(state: Mapping[str, Any], context: ParallelContext, parallel_model: ParallelModel) -> None:
    """Restore the random state that the same rank saved. (Another rank's would repeat its dropout: it is ignored.)"""
    if state["rank"] != context.rank:
        return
    set_random_state(state, context.device)
    if parallel_model.random is not None and state["model"] is not None:  # older checkpoints of data ranks have none
        parallel_model.random.state = state["model"].cpu()
        parallel_model.host_random.state = state["host"]


def seed_anew(seed: int, context: ParallelContext, parallel_model: ParallelModel) -> None:
    """Seed the model's random numbers again: on several ranks its separate sequence, as initialize does from the
    config's seed; in one process those of the GPU. (The CPU's also decide the order of the data.)"""
    if parallel_model.random is not None:
        apart = model_seed(seed, context, parallel_model.own_rng_axes)
        parallel_model.random.state = torch.Generator(context.device).manual_seed(apart).get_state()
        parallel_model.host_random.seed, parallel_model.host_random.state = model_seed(seed, context), None
    elif context.device.type == "cuda":
        torch.cuda.manual_seed(model_seed(seed, context))
