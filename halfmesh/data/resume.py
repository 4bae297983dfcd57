"""Mid-epoch resume of the dataloader."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..parallel.context import ParallelContext
from ..parallel.random import CPU, OwnRandomness, SharedRandomness, derived_seed, random_state
from .sharding import ShardedLoader, is_stateful

_KEPT = 2
"""Fetches whose state is kept: of the batch that was handed out last, and of one fetched ahead of it."""


@dataclass
class EpochState:
    """How far an epoch has come.

    Attributes:
        epoch: its number, from 0; -1 before the first.
        fetched: batches fetched.
        handed: of these, how many were handed out.
        trained: of these, those up to the last one that was trained on.
        running: whether it is being iterated.
        finished: whether it came to its end.
        start: random numbers when its order was drawn; the same on all ranks.
        fetches: random numbers when each of the last batches was fetched, by its number, in one process without
            workers: there the dataset draws from the generators that the loop draws from.
        loader_states: `state_dict` of a loader that has one, before each of the last fetches, by its number.
    """

    epoch: int = -1
    fetched: int = 0
    handed: int = 0
    trained: int = 0
    running: bool = False
    finished: bool = False
    start: Mapping[str, Any] = field(default_factory=dict)
    fetches: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    loader_states: dict[int, Any] = field(default_factory=dict)

    def state_dict(self, loader: Any) -> dict[str, Any]:
        """What `epoch_batches` needs to go on with the first batch that was not trained on; `loader` is iterated."""
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "trained": self.trained,
            "finished": self.finished or not (self.running or self.trained),  # a look at some batches is no epoch
            "start": self.start,
            "fetches": dict(self.fetches),
        }
        if self.fetched and is_stateful(loader):
            of_fetch = self.loader_states.get(self.trained)
            state["loader"] = copy.deepcopy(loader.state_dict()) if of_fetch is None else of_fetch
        return state


def epoch_batches(
    state: EpochState,
    sharded: ShardedLoader,
    context: ParallelContext,
    seed: int,
    saved: Mapping[str, Any] | None = None,
    same_layout: bool = True,
) -> Iterator[Any]:
    """The batches of epoch `state.epoch`, in the order that the user's own loader draws in one process; on several
    ranks from where random numbers are on rank 0. `state` is kept up to date.

    In one process all else is drawn as in a plain loop, too. On several ranks what the dataset draws here comes from
    `seed`, the data rank, the epoch and the batch, so that ranks that compute one batch fetch the same.

    Args:
        saved: an `EpochState.state_dict`, whose batches that were trained on are left out. Of this rank in the same
            layout, batches that had been fetched are fetched with the same random numbers again, and a loader that has
            a state gets it; another one's `saved` has neither.
        same_layout: whether `saved` is of this rank in the same layout.
    """
    loader: Any = sharded.loader
    several = context.size > 1
    sharded.set_epoch(state.epoch)
    knows_place = saved is not None and "loader" in saved and is_stateful(loader)
    if saved is not None and knows_place:
        loader.load_state_dict(saved["loader"])
    if saved is None or saved["finished"]:
        same_layout = True
        generators = [generator.get_state() for generator in sharded.generators()]
        state.start = {"random": random_state(CPU), "generators": generators}
        if sharded.is_random:
            state.start = context.from_first(state.start)
    else:
        state.start, state.fetched = saved["start"], saved["trained"]
        state.fetches = dict(saved["fetches"])
    state.handed = state.trained = state.fetched
    set_generators(sharded, state.start["generators"])
    order, again = SharedRandomness(state.start["random"]), dict(state.fetches)
    worker_seed = derived_seed(seed, context.dp_rank, state.epoch)
    batches = sharded.batches(order, state.epoch, worker_seed, 0 if knows_place else state.fetched)
    notes_random = not (several or loader.num_workers)
    while True:
        scope: AbstractContextManager[Any] = nullcontext()
        if sharded.is_stream and (several or not same_layout):
            scope = order
        elif several and not loader.num_workers:
            scope = OwnRandomness(derived_seed(seed, context.dp_rank, state.epoch, state.fetched))
        elif state.fetched in again:
            scope = OwnRandomness(again.pop(state.fetched))
        with scope:
            if notes_random:  # it costs some 50 us
                _keep(state.fetches, state.fetched, random_state(CPU))
            if is_stateful(loader):
                _keep(state.loader_states, state.fetched, copy.deepcopy(loader.state_dict()))
            batch = next(batches, _END)
        if batch is _END:
            return
        state.fetched += 1
        yield batch


_END = object()


def set_generators(sharded: ShardedLoader, states: list[Any]) -> None:
    """Give the loader's generators these states."""
    for generator, state in zip(sharded.generators(), states, strict=False):
        generator.set_state(state.cpu())


def _keep(states: dict[int, Any], number: int, state: Any) -> None:
    states[number] = state
    states.pop(number - _KEPT, None)
