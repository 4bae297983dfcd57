"""Resumes the dataloader in the middle of an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..parallel.mesh import ParallelContext
from ..parallel.rng import CPU, IsolatedRNG, SharedRNG, derived_seed, random_state
from .sharding import ShardedLoader, is_stateful

_END = object()


@dataclass
class EpochState:
    """The position in an epoch.

    Attributes:
        epoch: its number, from 0; -1 before the first.
        fetched: the number of batches fetched.
        handed: the number of these that were yielded to the loop.
        trained: the number that were yielded up to the last one that was trained on.
        running: it is being iterated.
        finished: it reached its end.
        start: generator states when its order was drawn; the same on all ranks.
        fetches: generator states before each of the last fetches, by batch; only in one process without workers, where
            the dataset and the loop draw from the same generators.
        loader_states: `state_dict` of a loader that has one, before each of the last fetches, by batch.
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
        """The state for `epoch_batches` to resume at the first batch that was not trained on; `loader` is iterated."""
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "trained": self.trained,
            "finished": self.finished or not (self.running or self.trained),  # a look at some batches is not an epoch
            "start": self.start,
            "fetches": dict(self.fetches),
        }
        if self.fetched and is_stateful(loader):
            before = self.loader_states.get(self.trained)
            state["loader"] = copy.deepcopy(loader.state_dict()) if before is None else before
        return state


def epoch_batches(
    state: EpochState,
    sharded: ShardedLoader,
    context: ParallelContext,
    seed: int,
    saved: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """The batches of epoch `state.epoch`, in the order that the user's loader draws in one process; on several ranks
    from the generators of rank 0. `state` is kept up to date.

    In one process the dataset draws as in a plain loop. On several ranks a dataset without workers draws from a seed
    of `seed`, the data rank, the epoch and the batch, so that ranks that compute one batch together fetch the same.

    Args:
        saved: an `EpochState.state_dict`. Batches that were trained on are skipped; a batch that was only fetched is
            fetched again with the saved generator states; a loader with a `state_dict` is restored to its state.
    """
    loader: Any = sharded.loader
    several = context.size > 1
    sharded.set_epoch(state.epoch)
    knows_position = saved is not None and "loader" in saved and is_stateful(loader)
    if saved is not None and knows_position:
        loader.load_state_dict(saved["loader"])
    in_loop = not several  # a stream draws from the generators of the loop
    if saved is None or saved["finished"]:
        generators = [generator.get_state() for generator in sharded.generators()]
        state.start = {"random": random_state(CPU), "generators": generators}
        if sharded.is_random:
            state.start = context.from_first(state.start)
    else:
        state.start, state.fetched, state.fetches = saved["start"], saved["trained"], dict(saved["fetches"])
        in_loop = in_loop and bool(state.fetches)
    state.handed = state.trained = state.fetched
    set_generators(sharded, state.start["generators"])
    order, again = SharedRNG(state.start["random"]), dict(state.fetches)
    worker_seed = derived_seed(seed, context.dp_rank, state.epoch)
    batches = sharded.batches(order, state.epoch, worker_seed, 0 if knows_position else state.fetched)
    while True:
        scope: AbstractContextManager[Any] = nullcontext()
        if sharded.is_stream and not in_loop:
            scope = order
        elif several and not loader.num_workers:
            scope = IsolatedRNG(derived_seed(seed, context.dp_rank, state.epoch, state.fetched))
        elif state.fetched in again:
            scope = IsolatedRNG(again.pop(state.fetched))
        with scope:
            if not (several or loader.num_workers):  # it costs some 50 us
                _keep(state.fetches, state.fetched, random_state(CPU))
            if is_stateful(loader):
                _keep(state.loader_states, state.fetched, copy.deepcopy(loader.state_dict()))
            batch = next(batches, _END)
        if batch is _END:
            return
        state.fetched += 1
        yield batch


def set_generators(sharded: ShardedLoader, states: list[Any]) -> None:
    """Set the states of the loader's generators."""
    for generator, state in zip(sharded.generators(), states, strict=False):
        generator.set_state(state.cpu())


def _keep(states: dict[int, Any], number: int, state: Any) -> None:
    """Keep `state` for the batch that was yielded last, and for one fetched ahead of it."""
    states[number] = state
    states.pop(number - 2, None)
