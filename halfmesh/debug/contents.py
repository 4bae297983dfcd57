"""Copies of what can be changed in place: tensors, containers, generators of random numbers."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

Undo = Callable[[], Any]

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


def contents(values: Iterable[Any], known: dict[int, Any]) -> Iterator[Undo]:
    """What puts back the contents of `values`, and of all in them. Of parameters, of those that are not trained.

    Args:
        known: what was met before, by id; added to, so that nothing is copied twice.
    """
    stack = list(values)
    while stack:
        value = stack.pop()
        if id(value) in known:
            continue
        if type(value) in (*_CONTAINERS, tuple):
            known[id(value)] = value
            stack += [*value, *value.values()] if isinstance(value, dict) else value
        undo = _content(value)
        if undo is not None:
            known[id(value)] = value
            yield undo


def _content(value: Any) -> Undo | None:
    if isinstance(value, nn.Parameter):
        return None if value.requires_grad else _frozen(value)
    if isinstance(value, torch.Tensor):
        return None if value.is_meta else _tensor(value)
    if type(value) in _CONTAINERS:
        return _container(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    return None


def _tensor(value: torch.Tensor) -> Undo:
    held = _once(value.detach())
    copy = held.clone()
    return lambda: held.data.copy_(copy)  # `data`: not counted as a change, which it is not


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Each number once, where `tensor` is expanded: torch refuses to write the others."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _frozen(param: nn.Parameter) -> Undo | None:
    """The copy is in the memory of the host: these may be most of the model. None for special ones (packed ones of
    libraries), which no forward writes."""
    divided = hasattr(param, "to_local")
    if param.is_meta or not (divided or type(param) is nn.Parameter):
        return None
    held: torch.Tensor = param.detach().to_local() if divided else param.data  # type: ignore[attr-defined]
    copy = held.to("cpu", copy=True)

    def put_back() -> None:
        if not divided and (param.data_ptr() != held.data_ptr() or param.shape != held.shape):
            param.data = held  # the forward gave it other memory
        held.data.copy_(copy)

    return put_back


def _container(value: Any) -> Undo:
    copy = value.copy()

    def put_back() -> None:
        value.clear()
        (value.extend if hasattr(value, "extend") else value.update)(copy)

    return put_back


def _array(value: np.ndarray[Any, Any]) -> Undo | None:
    if not value.flags.writeable:
        return None
    copy = value.copy()
    return lambda: np.copyto(value, copy)
