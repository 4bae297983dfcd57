"""O1: casts around torch functions, inside a scope. Nothing is patched; what runs outside the scope is not touched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import torch_private
from .cast_lists import Cast, CastTable, is_marked

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Tensors without ideas of their own about torch's functions."""
_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


@contextmanager
def o1_scope(table: CastTable, device_type: str) -> Iterator[None]:
    """Cast by `table` within. Nests with `torch.autocast(enabled=False)`, which turns the casts off, as there.

    In here `torch.is_autocast_enabled(device_type)` is true: that is how models, `custom_fwd` and activation
    checkpointing know, and how `autocast(enabled=False)` inside a model reaches the casts. torch's own autocast lists
    are kept out: it is switched off around each function that runs. An inner autocast with another dtype follows
    torch's lists.
    """
    with torch.autocast(device_type, torch.float16, cache_enabled=False), O1Casts(table, device_type):
        yield


class O1Casts(TorchFunctionMode):
    """Applies the casts of `table` to tensors on `device_type` while torch's autocast is enabled there for fp16.

    An instance belongs to one scope of one thread. Alone, without autocast, it waits: a backward runs in it, so that
    activation checkpointing, which enables autocast again as the forward had it, computes the same a second time.
    """

    def __init__(self, table: CastTable, device_type: str) -> None:
        super().__init__()
        self._table = table
        self._device_type = device_type
        self._is_there = attrgetter(f"is_{device_type}")
        self._weights: dict[nn.Parameter, tuple[tuple[int, int], torch.Tensor]] = {}
        self._open: set[Callable[..., Any]] = set()
        table.watch(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:  # the casts wait, for what is computed again
            with torch.autocast(self._device_type, enabled=False), self:
                return _insides(func)(*args, **kwargs)
        device = self._device_type
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.float16:
            return func(*args, **kwargs)
        cast = self._table.get(func)
        if is_marked(func):
            args, kwargs = self._apply(cast, func, args, kwargs)
            with self:
                return func.__wrapped__(*args, **kwargs)
        if cast is None and type(func) is FunctionType and func not in self._open and _PLAIN.issuperset(types):
            return self._run_insides(func, args, kwargs)
        torch.set_autocast_enabled(device, False)
        try:
            if cast is not None:
                args, kwargs = self._apply(cast, func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, True)

    def forget(self) -> None:
        """Drop the cast weights."""
        self._weights.clear()

    def _run_insides(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a Python function of torch that is not listed so that what it calls is seen here, one by one."""
        self._open.add(func)  # some come back to themselves by another way
        try:
            with self:
                return _insides(func)(*args, **kwargs)
        finally:
            self._open.discard(func)

    def _apply(self, cast: Cast | None, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments as `cast` wants them."""
        if cast is Cast.HALF:
            return _map(self._to_half, args, kwargs)
        if cast is Cast.FLOAT:
            return self._to(torch.float32, args, kwargs)
        dtypes = {tensor.dtype for tensor in self._tensors((args, kwargs.values()))}
        if cast is Cast.WIDEST:
            mixed = len(dtypes) > 1 and torch.float64 not in dtypes  # with doubles torch promotes by itself
            return self._to(torch.float32, args, kwargs) if mixed else (args, kwargs)
        if cast is Cast.BANNED:
            if torch.float16 in dtypes:
                raise NotImplementedError(_banned_message(func))
            return args, kwargs
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not first.is_floating_point():
            return args, kwargs
        if cast is Cast.NOT_HALF and first.dtype == torch.float16:
            raise NotImplementedError(_in_place_message(func))
        rest, kwargs = self._to(first.dtype, args[1:], kwargs)
        return (first, *rest), kwargs

    def _to(self, dtype: torch.dtype, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return _map(lambda tensor: tensor.to(dtype) if self._concerns(tensor) else tensor, args, kwargs)

    def _to_half(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float16 or not self._concerns(tensor):
            return tensor
        if not isinstance(tensor, nn.Parameter) or tensor.is_inference() or torch.is_inference_mode_enabled():
            return tensor.to(torch.float16)
        stamp = torch_private.edit_stamp(tensor)
        known_stamp, known = self._weights.get(tensor, (None, tensor))
        with_grad = tensor.requires_grad and torch.is_grad_enabled()
        if known_stamp == stamp and known.requires_grad == with_grad:
            return known
        half = tensor.to(torch.float16)
        if not torch_private.is_functorch_tensor(half):
            self._weights[tensor] = stamp, half
        return half

    def _concerns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and self._is_there(tensor)

    def _tensors(self, values: Any) -> Iterator[torch.Tensor]:
        for value in values:
            if isinstance(value, torch.Tensor):
                if self._concerns(value):
                    yield value
            elif not isinstance(value, str) and isinstance(value, (list, tuple, type({}.values()))):
                yield from self._tensors(value)


def _map(cast: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`cast` applied to tensors and to those in lists and tuples."""

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return cast(value)
        return type(value)([walk(item) for item in value]) if type(value) in (list, tuple) else value

    return tuple(walk(value) for value in args), {name: walk(value) for name, value in kwargs.items()}


@functools.cache
def _insides(func: FunctionType) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not ask for overrides of itself: it would be sent back here."""
    quiet = {name: _never for name in func.__code__.co_names if name.startswith("has_torch_function")}
    copy = FunctionType(
        func.__code__, {**func.__globals__, **quiet}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(*_: Any) -> bool:
    return False


def _in_place_message(func: Any) -> str:
    name = func.__name__
    return (
        f"{name} changes an fp16 tensor in place, but O1 computes {name.strip('_')} in fp32; write it out of place "
        "(y = x.exp() for x.exp_()), or call it on x.float()"
    )


def _banned_message(func: Any) -> str:
    return (
        f"{func.__name__} with fp16 arguments is not safe under O1: near 0 and 1 their logarithms overflow; join "
        "sigmoid and loss (binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss), or take the arguments to fp32 "
        "with .float()"
    )
