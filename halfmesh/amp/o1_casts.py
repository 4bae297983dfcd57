"""O1: casts around torch functions, inside a scope. Nothing is patched; what runs outside the scope is not touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import FunctionType, MethodWrapperType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import torch_private
from .cast_lists import Cast, CastTable, is_marked, unmarked

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Tensors without ideas of their own about torch's functions."""
_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_DATA: Any = torch.Tensor.data
"""Writes through it are not counted either."""


@contextmanager
def o1_scope(table: CastTable, device_type: str) -> Iterator[None]:
    """Cast by `table` within. Nests with `torch.autocast(enabled=False)`, which turns the casts off, as there.

    In here `torch.is_autocast_enabled(device_type)` is true: that is how models, `custom_fwd` and activation
    checkpointing know, and how `autocast(enabled=False)` inside a model reaches the casts. torch's own autocast lists
    are kept out: it is switched off around each function that runs. They act on what cannot be seen from here, which
    is the inside of TorchScript and of operators of `torch.ops`, and under an inner autocast with another dtype.
    `torch.compile` cannot follow the casts; compiled models are refused under O1.
    """
    with torch.autocast(device_type, torch.float16, cache_enabled=False), O1Casts(table, device_type) as casts:
        try:
            yield
        finally:
            casts.forget()


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
        self._weights: dict[torch.Tensor, tuple[tuple[int, int], torch.Tensor]] = {}
        self._open: set[Callable[..., Any]] = set()
        table.watch(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is MethodWrapperType:  # an attribute, such as x.shape
            if func.__self__ is _DATA:
                self._weights.pop(args[0], None)  # x.data.clamp_() does not count as a change of x
            return func(*args, **kwargs)
        if type(func) is FunctionType and (func in _BACKWARD or is_marked(func)):
            return self._call_open(func, args, kwargs)
        if func in torch_private.FUSED_STEPS:
            self.forget()  # it changes weights without counting it as a change
        cast = self._table.get(func)
        if not self._is_active() or (cast is None and torch_private.is_operator(func)):
            return func(*args, **kwargs)
        if cast is None and type(func) is FunctionType and func not in self._open:
            return self._run_insides(func, types, args, kwargs)
        torch.set_autocast_enabled(self._device_type, False)
        try:
            if cast is not None:
                args, kwargs = self._apply(cast, func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(self._device_type, True)

    def forget(self) -> None:
        """Drop the cast weights."""
        self._weights.clear()

    def _is_active(self) -> bool:
        device = self._device_type
        return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16

    def _call_open(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a backward, in which the casts wait for what is computed again, or a decorated function."""
        if func in _BACKWARD:
            with torch.autocast(self._device_type, enabled=False), self:
                return _insides(func)(*args, **kwargs)
        if self._is_active():
            args, kwargs = self._apply(self._table.get(func), func, args, kwargs)
        with self:
            return unmarked(func)(*args, **kwargs)

    def _run_insides(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a Python function of torch that is not listed so that what it calls is seen here, one by one."""
        if not _PLAIN.issuperset(types):
            return self._ask(types, func, args, kwargs)
        self._open.add(func)  # some come back to themselves by another way
        try:
            with self:
                return _insides(func)(*args, **kwargs)
        finally:
            self._open.discard(func)

    def _ask(self, types: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Leave it to the subclasses of Tensor among the arguments, as torch does; most let `func` itself run."""
        with self:
            for kind in types:
                result = kind.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        return NotImplemented

    def _apply(self, cast: Cast | None, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments as `cast` wants them, or as `out` does, which is written in place."""
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor) and self._concerns(out) and not is_marked(func):
            return self._to(out.dtype, args, kwargs)
        if cast is Cast.HALF:
            return _map(self._to_half, args, kwargs)
        if cast is Cast.FLOAT:
            return self._to(torch.float32, args, kwargs)
        if cast is Cast.SELF or cast is Cast.NOT_HALF:
            first = args[0] if args else kwargs.get("input")
            if not isinstance(first, torch.Tensor) or not self._concerns(first):
                return args, kwargs
            if cast is Cast.NOT_HALF and first.dtype == torch.float16:
                raise NotImplementedError(_in_place_message(func))
            return self._to(first.dtype, args, kwargs)
        dtypes = self._dtypes((*args, *kwargs.values()))
        if cast is Cast.BANNED and torch.float16 in dtypes:
            raise NotImplementedError(_banned_message(func))
        mixed = len(dtypes) > 1 and torch.float64 not in dtypes  # with doubles torch promotes by itself
        return self._to(torch.float32, args, kwargs) if mixed and cast is Cast.WIDEST else (args, kwargs)

    def _to(self, dtype: torch.dtype, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.dtype != dtype and self._concerns(tensor) else tensor

        return _map(cast, args, kwargs)

    def _to_half(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float16:
            return tensor
        known = self._weights.get(tensor)
        if known is not None:
            stamp, half = known
            with_grad = tensor.requires_grad and torch.is_grad_enabled()
            if stamp == torch_private.edit_stamp(tensor) and half.requires_grad == with_grad:
                return half
        if not self._concerns(tensor):
            return tensor
        half = tensor.to(torch.float16)
        if isinstance(tensor, nn.Parameter) and not tensor.is_inference() and _lasts(half):
            self._weights[tensor] = torch_private.edit_stamp(tensor), half
        return half

    def _concerns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and self._is_there(tensor)

    def _dtypes(self, values: Iterable[Any]) -> set[torch.dtype]:
        found = set()
        for value in values:
            if isinstance(value, torch.Tensor):
                if self._concerns(value):
                    found.add(value.dtype)
            elif type(value) in (list, tuple):
                found |= self._dtypes(value)
        return found


def _map(cast: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`cast` applied to tensors and to those in lists and tuples."""
    args = [cast(value) if isinstance(value, torch.Tensor) else _map_items(cast, value) for value in args]
    if kwargs:
        kwargs = {
            name: cast(value) if isinstance(value, torch.Tensor) else _map_items(cast, value)
            for name, value in kwargs.items()
        }
    return args, kwargs


def _map_items(cast: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if type(value) is list or type(value) is tuple:
        return type(value)(_map(cast, value, {})[0])
    return value


def _lasts(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a place outside inference mode, transforms and the like, which may be on right now."""
    return type(tensor) is torch.Tensor and not tensor.is_inference() and not torch_private.is_functorch_tensor(tensor)


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
