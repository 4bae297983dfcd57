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
from .samplers import generators, set_generators

_CPU = torch.device("cpu")
_REMEMBERED = 2
"""Fetches whose random numbers are kept: of the batch that was handed out last, and of the one fetched ahead of it."""


@dataclass
class Course:
    """One epoch.

    Attributes:
        epoch: its number, from 0.
        handed: batches handed out.
        trained: of these, those up to the last one that was trained on.
        runs: whether it is being iterated.
        finished: whether it came to its end.
        start: where the random numbers were when its order was drawn.
        fetches: where they were when each of the last batches was fetched, by its number.
        here: whether batches are fetched in this process, where they may draw.
    """

    epoch: int = -1
    handed: int = 0
    trained: int = 0
    runs: bool = False
    finished: bool = False
    start: dict[str, Any] = field(default_factory=dict)
    fetches: dict[int, dict[str, Any]] = field(default_factory=dict)
    here: bool = True

    def note_fetch(self, number: int) -> None:
        """Batch `number` is fetched next."""
        if self.here:  # it costs some 50 us
            self.fetches[number] = random_state(_CPU)
            self.fetches.pop(number - _REMEMBERED, None)

    def state_dict(self) -> dict[str, Any]:
        """What `resume` needs."""
        over = self.finished or not (self.runs or self.trained)  # a look at some batches is not an epoch
        return {
            "epoch": self.epoch,
            "trained": self.trained,
            "finished": over,
            "start": self.start,
            "fetches": dict(self.fetches),
        }


def draw(course: Course, loader: Any, drawn: AbstractContextManager[Any]) -> Iterator[Any]:
    """The batches of an epoch, from its beginning; what is needed to go on with it later is noted in `course`.

    Args:
        drawn: a scope in which batches are fetched.
    """
    with drawn:
        course.start = _start(loader)
        batches = iter(loader)
    yield from _fetch(course, batches, drawn, 0)


def draw_rest(
    course: Course, loader: Any, drawn: AbstractContextManager[Any], saved: Mapping[str, Any], is_own: bool
) -> Iterator[Any]:
    """The batches of an epoch that were not trained on when `saved` was taken (a `Course.state_dict`).

    Its order is drawn again, from the same random numbers. Batches that had been fetched already are fetched with those
    that they had; then random numbers go on as they were before this call. A DataLoader does not read what is skipped.

    Args:
        is_own: whether it was saved by the same rank of the same layout. Else the order does not depend on the rank's
            random numbers, and they are left as they are; it may depend on its samplers' generators.
    """
    number = course.handed = course.trained = saved["trained"]
    course.fetches = dict(saved["fetches"]) if is_own else {}
    fetches, aside = dict(course.fetches), _aside if is_own else nullcontext

    def go_on() -> None:
        if number in fetches:
            set_random_state(fetches[number], _CPU)

    with aside(), drawn:
        if is_own:
            set_random_state(saved["start"]["random"], _CPU)
        set_generators(loader, saved["start"]["generators"], is_own)
        course.start = _start(loader)
        batches = _skipping(loader, number, go_on)
        batch = next(batches, _NOTHING)
    while batch is not _NOTHING:
        yield batch
        number += 1
        if number not in fetches:
            yield from _fetch(course, batches, drawn, number)
            return
        with aside(), drawn:
            go_on()
            batch = next(batches, _NOTHING)


def _start(loader: Any) -> dict[str, Any]:
    """What the order of an epoch depends on, before it is drawn."""
    return {"random": random_state(_CPU), "generators": [generator.get_state() for generator in generators(loader)]}


@contextmanager
def _aside() -> Iterator[None]:
    """What is drawn within is drawn as if it were not."""
    outside = random_state(_CPU)
    try:
        yield
    finally:
        set_random_state(outside, _CPU)


_NOTHING = object()


def _fetch(course: Course, batches: Iterator[Any], drawn: AbstractContextManager[Any], number: int) -> Iterator[Any]:
    while True:
        with drawn:
            course.note_fetch(number)
            batch = next(batches, _NOTHING)
        if batch is _NOTHING:
            return
        yield batch
        number += 1


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
