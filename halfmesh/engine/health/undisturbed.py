"""A scope that leaves no trace: what is computed in it changes nothing of the run."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..rank_random import rank_random, set_rank_random
from .parts import Parts

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque, OrderedDict)

Undo = Callable[[], Any]


@contextmanager
def undisturbed(parts: Parts) -> Iterator[None]:
    """Put back what a forward and a backward change: gradients, buffers and other attributes of modules, random
    numbers, the accumulation cycle. Outside of a cycle only.

    (Not seen: what a model changes inside objects of its own.)
    """
    undo = [*_gradients(parts), *_random_numbers(parts)]
    for module in parts.modules():
        undo += _attributes(module)
    try:
        yield
    finally:
        parts.cycle.clear()
        if parts.division.sharded is not None:  # a forward without a backward leaves weights gathered
            parts.division.sharded.reshard()
        with torch.no_grad():
            for put_back in undo:
                put_back()


def _gradients(parts: Parts) -> Iterator[Undo]:
    """Parameters that the optimizer does not hold may have some that nobody clears."""
    shards = parts.update.holdings.shards
    holders: list[Any] = [*shards, *(shard.source for shard in shards if shard.source is not None)]
    params = [holder.param for holder in holders]
    known = {id(param) for param in params}
    params += [param for param in parts.others() if id(param) not in known]
    for holder in holders:
        yield _Kept(holder, "main_grad").put_back
        holder.main_grad = None
    for param in params:
        yield _Kept(param, "grad").put_back
        param.grad = None


class _Kept:
    """One attribute as it is now."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name, self._value = owner, name, getattr(owner, name)

    def put_back(self) -> None:
        setattr(self._owner, self._name, self._value)


def _random_numbers(parts: Parts) -> Iterator[Undo]:
    state = rank_random(parts.context, parts.division)
    yield lambda: set_rank_random(state, parts.context, parts.division)


def _attributes(module: nn.Module) -> Iterator[Undo]:
    own = vars(module)
    buffers = dict(module._buffers)
    before = {name: value for name, value in own.items() if name not in _OF_EVERY_MODULE}

    def put_back() -> None:
        module._buffers.clear()
        module._buffers.update(buffers)
        for name in [name for name in own if name not in before and name not in _OF_EVERY_MODULE]:
            del own[name]
        own.update(before)

    yield put_back
    for value in (*buffers.values(), *before.values()):
        yield from _content(value)


def _content(value: Any) -> Iterator[Undo]:
    """Of what can be changed in place."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta:
        held, copy = value.detach(), value.detach().clone()
        yield lambda: held.data.copy_(copy)  # `data`: not counted as a change, which it is not
    elif type(value) in _CONTAINERS:
        copy = value.copy()
        yield lambda: _refill(value, copy)
    elif isinstance(value, torch.Generator):
        state = value.get_state()
        yield lambda: value.set_state(state)
    elif isinstance(value, random.Random):
        drawn = value.getstate()
        yield lambda: value.setstate(drawn)
    elif isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        yield lambda: setattr(value.bit_generator, "state", bits)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(content)
