"""As many calls of the engine on each data rank in an evaluation, where each forward needs all of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ..config.composition import Setup
from ..errors import InputError
from ..utils.engine_hook import EngineHook
from ..utils.tensors import map_tensors

if TYPE_CHECKING:
    from ..data.loader import EngineDataLoader
    from ..data.sharding import ShardedLoader
    from .engine import Engine

T = TypeVar("T")


def even_out(loader: EngineDataLoader, engine: Engine) -> EngineDataLoader:
    """`loader`, for evaluation: where data ranks meet in forward, its epochs end with as many calls on each."""
    if Setup.of(engine.config, engine.context.size).meets_in_forward:
        loader.even = RepeatedCalls(engine)
    return loader


class RepeatedCalls(EngineHook):
    """A rank that has fewer batches repeats the calls of its last one when its loop has ended, so that nobody sees what
    they return. A rank that has no batch makes the calls of another one, which sends their inputs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)  # which has the loader
        self._calls: list[Any] = []
        self._is_new_batch = self._sends = False

    def evened(self, batches: Iterator[T], loader: ShardedLoader) -> Iterator[T]:
        """`batches`; at their end the calls that this rank has made too few. (After a `break` it makes none.)"""
        engine = self._engine()
        assert engine is not None, "its loader is iterated"
        self._calls, self._sends = [], False
        with engine._hooks.added(self):
            for batch in batches:
                self._is_new_batch, self._sends = True, loader.some_have_none
                yield batch
        if loader.some_have_none:
            while call := next(filter(None, engine.context.everyone(None)), None):
                args, kwargs = map_tensors(lambda tensor: tensor.to(engine.device), call)
                engine(*args, **kwargs)
        elif loader.missing and not self._calls:
            raise InputError(
                "this data rank has no batch to evaluate, and others have one, for which they need all ranks; evaluate "
                "a DataLoader whose sampler has a length, or one with a batch for each data rank"
            )
        for args, kwargs in self._calls * loader.missing:
            engine(*args, **kwargs)
        self._calls = []

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_new_batch:
            self._calls, self._is_new_batch = [], False
        self._calls.append((args, kwargs))
        if self._sends and (engine := self._engine()) is not None:
            engine.context.everyone(map_tensors(lambda tensor: tensor.detach().cpu(), (args, kwargs)))
