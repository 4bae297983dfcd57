"""As many calls of the engine on each data rank in an evaluation, where each forward needs all of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..config.composition import Setup
from ..errors import InputError
from ..utils.engine_hook import EngineHook

if TYPE_CHECKING:
    from ..data.loader import EngineDataLoader
    from ..data.sharding import ShardedLoader
    from .engine import Engine

T = TypeVar("T")
_FEW = (
    "the evaluation loader has no batch for some of the %d data ranks, and each forward needs all of them (fsdp, "
    "expert); evaluate more samples, smaller batches, without drop_last, or on fewer ranks"
)


def even_out(loader: EngineDataLoader, engine: Engine) -> EngineDataLoader:
    """`loader`, for evaluation: where data ranks meet in forward, its epochs end with as many calls on each."""
    if Setup.of(engine.config, engine.context.size).meets_in_forward:
        loader.even = partial(_evened, weakref.ref(engine))  # the engine has the loader
    return loader


def _evened(engine_of: weakref.ref[Engine], batches: Iterator[T], loader: ShardedLoader) -> Iterator[T]:
    """`batches`; at their end a rank that has fewer repeats the calls of its last one, so that nobody sees what they
    return. (After a `break` it makes none.)

    Raises:
        InputError: some rank has no batch; on all ranks, if the loader's sampler has a length.
    """
    engine = engine_of()
    assert engine is not None, "its loader is iterated"
    last, has_batch = _Calls(engine), False
    with engine._hooks.added(last):
        for batch in batches:
            if loader.some_have_none:  # known since the first batch was asked for
                raise InputError(_FEW % engine.context.dp_size)
            last.calls, has_batch = [], True
            yield batch
    if loader.missing and not has_batch:
        raise InputError(_FEW % engine.context.dp_size)
    if not last.is_evaluation:
        return
    for has_grad, method, args, kwargs in last.calls * loader.missing:
        with torch.set_grad_enabled(has_grad):  # fsdp keeps weights gathered for a backward
            if method is None:
                engine(*args, **kwargs)
            else:
                engine.call(method, *args, **kwargs)


class _Calls(EngineHook):
    """The calls of one batch of an evaluation. Its iterator may be kept while the engine trains."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step = engine, engine.global_step
        self.calls: list[tuple[bool, str | None, tuple[Any, ...], dict[str, Any]]] = []

    @property
    def is_evaluation(self) -> bool:
        """True until an update: a loop that trains between its batches continues with a new iterator, and calls."""
        return self._engine.global_step == self._step

    def before_forward(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_training = self._engine.training and torch.is_grad_enabled()
        if self.is_evaluation and not is_training:
            self.calls.append((torch.is_grad_enabled(), method, args, kwargs))
