"""How far training has come in its data, and how an epoch that was left is gone on with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..engine._torch import without_workers
from ..parallel.context import ParallelContext
from ..parallel.random import CPU, OwnRandomness, SharedRandomness, derived_seed, random_state
from .samplers import draw_seed, find_sharded, generators, is_random, is_stream, seed_workers, set_epoch, set_generators
from .transfer import workers

_REMEMBERED = 2
"""Fetches whose random numbers are kept: of the batch that was handed out last, and of one fetched ahead of it."""


@dataclass
class Course:
    """One epoch.

    Attributes:
        epoch: its number, from 0.
        handed: batches handed out.
        trained: of these, those up to the last one that was trained on.
        backwards: how many backwards ran.
        runs: whether it is being iterated.
        finished: whether it came to its end.
        start: where the random numbers were when its order was drawn; the same on all ranks.
        fetches: where they were when each of the last batches was fetched, by its number, in one process without
            workers: there the dataset draws what the loop draws.
        fetched: batches fetched, with those that are not handed out yet.
    """

    epoch: int = -1
    handed: int = 0
    trained: int = 0
    backwards: int = 0
    runs: bool = False
    finished: bool = False
    start: Mapping[str, Any] = field(default_factory=dict)
    fetches: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    fetched: int = 0

    def state_dict(self) -> dict[str, Any]:
        """What `draw` needs to go on with it."""
        over = self.finished or not (self.runs or self.trained)  # a look at some batches is not an epoch
        return {
            "epoch": self.epoch,
            "trained": self.trained,
            "finished": over,
            "start": self.start,
            "fetches": dict(self.fetches),
        }


def draw(
    course: Course, loader: Any, context: ParallelContext, seed: int, saved: tuple[Mapping[str, Any], bool] | None
) -> Iterator[Any]:
    """The batches of an epoch, in the order that the user's own loader draws in one process; on several ranks from
    where random numbers are on rank 0.

    In one process all else is drawn as in a plain loop, too. On several ranks what the dataset draws here comes from
    `seed`, the epoch, the batch and the data rank, so that the ranks that compute one batch fetch the same.

    Args:
        saved: a `Course.state_dict`, whose batches that were trained on are left out: a DataLoader does not read them.
            And whether it is of the same rank of the same layout: then batches that had been fetched are fetched with
            the random numbers that they had.
    """
    set_epoch(loader, course.epoch)
    seed_workers(loader, derived_seed(seed, context.dp_rank, course.epoch))
    several = context.size > 1
    state, own = (None, True) if saved is None else saved
    if state is None:
        start: Mapping[str, Any] = {
            "random": random_state(CPU),
            "generators": [generator.get_state() for generator in generators(loader)],
        }
        course.start = context.from_first(start) if is_random(loader) else start
    else:
        course.handed = course.trained = course.fetched = state["trained"]
        course.start = state["start"]
    set_generators(loader, course.start["generators"])
    order = SharedRandomness(course.start["random"])
    if (sampler := find_sharded(loader)) is not None:
        sampler.draw(order)
    with order:
        batches = iter(loader) if state is None else _rest(loader, course.fetched)
    again = dict(state["fetches"]) if state is not None and own else {}
    course.fetches = dict(again)
    notes = not (several or workers(loader))
    while True:
        scope: AbstractContextManager[Any] = nullcontext()
        if is_stream(loader) and (several or not own):
            scope = order
        elif several and not workers(loader):
            scope = OwnRandomness(derived_seed(seed, context.dp_rank, course.epoch, course.fetched))
        elif course.fetched in again:
            scope = OwnRandomness(again.pop(course.fetched))
        with scope:
            if notes:  # it costs some 50 us
                course.fetches[course.fetched] = random_state(CPU)
                course.fetches.pop(course.fetched - _REMEMBERED, None)
            batch = next(batches, _NOTHING)
        if batch is _NOTHING:
            return
        course.fetched += 1
        yield batch


_NOTHING = object()


def _rest(loader: Any, count: int) -> Iterator[Any]:
    """The batches of `loader` without the first `count`. Their order is drawn now."""
    if not isinstance(loader, DataLoader) or is_stream(loader):
        batches = iter(loader)
        for _ in range(count):
            next(batches, None)
        return batches
    rest = without_workers(loader)
    rest.generator = torch.Generator().manual_seed(draw_seed(loader.generator))
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    items = iter(getattr(loader, name))
    begun = list(itertools.islice(items, count + 1))[count:]
    object.__setattr__(rest, name, itertools.chain(begun, items))  # DataLoader forbids it; this is a copy
    return iter(rest)
