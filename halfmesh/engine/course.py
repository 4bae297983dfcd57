"""How far training has come in its data, and how an epoch that was left is gone on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from .. import torch_private
from .checkpoint import random_state, set_random_state
from .samplers import OwnRandomness, generators, set_generators

_CPU = torch.device("cpu")
_REMEMBERED = 2
"""Fetches whose random numbers are kept: of the batch that was handed out last, and of one fetched ahead of it."""

Drawn = AbstractContextManager[Any]
"""A scope in which batches are fetched: `OwnRandomness`, or none."""


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
        start: where the random numbers were when its order was drawn.
        fetches: where they were when each of the last batches was fetched, by its number.
        here: whether batches are fetched in this process, where they may draw.
        fetched: batches fetched, with those that are not handed out yet.
        drawn: the scope in which they are.
    """

    epoch: int = -1
    handed: int = 0
    trained: int = 0
    backwards: int = 0
    runs: bool = False
    finished: bool = False
    start: dict[str, Any] = field(default_factory=dict)
    fetches: dict[int, dict[str, Any]] = field(default_factory=dict)
    here: bool = True
    fetched: int = 0
    drawn: Drawn = field(default_factory=nullcontext)

    def note_fetch(self, number: int) -> None:
        """Batch `number` is fetched next."""
        if self.here:  # it costs some 50 us
            self.fetches[number] = random_state(_CPU)
            self.fetches.pop(number - _REMEMBERED, None)

    def state_dict(self) -> dict[str, Any]:
        """What `resume` needs."""
        over = self.finished or not (self.runs or self.trained)  # a look at some batches is not an epoch
        fetches = dict(self.fetches)
        if self.here and isinstance(self.drawn, OwnRandomness) and self.drawn.state is not None:
            fetches[self.fetched] = self.drawn.state  # with which the next one will be
        return {
            "epoch": self.epoch,
            "trained": self.trained,
            "finished": over,
            "start": self.start,
            "fetches": fetches,
        }


def draw(course: Course, loader: Any, drawn: Drawn) -> Iterator[Any]:
    """The batches of an epoch, from its beginning; what is needed to go on with it later is noted in `course`."""
    course.drawn = drawn
    with drawn:
        course.start = _start(loader)
        batches = iter(loader)
    yield from _fetch(course, batches)


def draw_rest(course: Course, loader: Any, drawn: Drawn, saved: Mapping[str, Any], is_own: bool) -> Iterator[Any]:
    """The batches of an epoch that were not trained on when `saved` was taken (a `Course.state_dict`).

    Its order is drawn again, from the same random numbers. Batches that had been fetched already are fetched with those
    that they had; then random numbers go on as they were before this call. A DataLoader does not read what is skipped.

    Args:
        is_own: whether it was saved by the same rank of the same layout. Else the order does not depend on the rank's
            random numbers, and they are left as they are; it may depend on its samplers' generators.
    """
    course.handed = course.trained = course.fetched = saved["trained"]
    course.fetches = dict(saved["fetches"]) if is_own else {}
    course.drawn = drawn
    fetches = dict(course.fetches)
    aside: Callable[[], AbstractContextManager[dict[str, Any]]] = _aside if is_own else lambda: nullcontext({})
    # A batch that nothing was fetched ahead of draws from what this rank draws from; workers draw their seeds only.
    goes_on = is_own and course.here and course.fetched not in fetches and not isinstance(drawn, OwnRandomness)

    def go_on() -> None:
        if course.fetched in fetches:
            set_random_state(fetches[course.fetched], _CPU)
        elif goes_on:
            set_random_state(outside, _CPU)
            course.note_fetch(course.fetched)

    with aside() as outside, drawn:
        if is_own:
            set_random_state(saved["start"]["random"], _CPU)
        set_generators(loader, saved["start"]["generators"], is_own)
        course.start = _start(loader)
        batches = _skipping(loader, course.fetched, go_on)
        batch = next(batches, _NOTHING)
        if goes_on:
            outside.update(random_state(_CPU))
    while batch is not _NOTHING:
        course.fetched += 1
        yield batch
        if course.fetched not in fetches:
            yield from _fetch(course, batches)
            return
        with aside(), drawn:
            go_on()
            batch = next(batches, _NOTHING)


def _start(loader: Any) -> dict[str, Any]:
    """What the order of an epoch depends on, before it is drawn."""
    return {"random": random_state(_CPU), "generators": [generator.get_state() for generator in generators(loader)]}


@contextmanager
def _aside() -> Iterator[dict[str, Any]]:
    """What is drawn within is drawn as if it were not. Gives the random numbers that are put back at its end."""
    outside = random_state(_CPU)
    try:
        yield outside
    finally:
        set_random_state(outside, _CPU)


_NOTHING = object()


def _fetch(course: Course, batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with course.drawn:
            course.note_fetch(course.fetched)
            batch = next(batches, _NOTHING)
        if batch is _NOTHING:
            return
        course.fetched += 1
        yield batch


def _skipping(loader: Any, count: int, then: Callable[[], None]) -> Iterator[Any]:
    """The batches of `loader` without the first `count`; `then` is called before the next one is read."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        batches = iter(loader)
        for _ in range(count):
            next(batches, None)
        then()
        return batches
    rest = torch_private.without_workers(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    object.__setattr__(rest, name, _Rest(getattr(loader, name), count, then))  # DataLoader forbids it; this is a copy
    return iter(rest)


class _Rest(Sampler[Any]):
    """What `inner` gives after its first `count`."""

    def __init__(self, inner: Any, count: int, then: Callable[[], None]) -> None:
        self._inner, self._count, self._then = inner, count, then

    def __iter__(self) -> Iterator[Any]:
        rest = iter(self._inner)
        for _ in range(self._count):
            next(rest, None)
        self._then()
        yield from rest

    def __len__(self) -> int:
        return max(0, len(self._inner) - self._count)
