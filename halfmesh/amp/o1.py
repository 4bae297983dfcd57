"""apex's O1 without apex: casts the arguments of torch's functions by apex's lists, without replacing any of them.

The names in the lists are those of apex.amp (lists/functional_overrides, torch_overrides and tensor_overrides). Added:
`scaled_dot_product_attention`, which is newer than apex, runs in fp16 as under `torch.autocast`; `vdot`, `einsum` and
`tensordot` take the widest dtype where apex failed on mixed ones. Different: `h += f` keeps the dtype of `h`; apex
bound `h` to a new fp32 tensor, which views of the old one did not see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from operator import attrgetter
from types import FunctionType, MappingProxyType, MethodWrapperType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn, overrides
from torch.overrides import TorchFunctionMode

from ..errors import InputError
from ..utils.torch_private import BACKWARD, edit_stamp, without_override

_Function = TypeVar("_Function", bound=Callable[..., Any])


# -- the lists -------------------------------------------------------------------------------------------------


class Cast(Enum):
    """The cast of a function's floating-point arguments."""

    HALF = "all to fp16; a parameter once per scope"
    FLOAT = "all to fp32"
    WIDEST = "all to fp32 if their dtypes differ"
    SELF = "all to the dtype of the first, which the function writes in place"
    NOT_HALF = "as SELF; rejected if the first is fp16"
    BANNED = "rejected if one is fp16"


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc")
_PRODUCTS = ("prelu", "addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm")
_RNNS = ("rnn_relu", "rnn_tanh", "gru", "lstm", "rnn_relu_cell", "rnn_tanh_cell", "gru_cell", "lstm_cell")
_HALF = (*_CONVOLUTIONS, *_PRODUCTS)
_HALF_FUNCTIONAL = (*_CONVOLUTIONS, "linear", "scaled_dot_product_attention")

_POINTWISE = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan"),
    "pow",
)
_REDUCTIONS = ("cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var")
_FLOAT = (*_POINTWISE, *_REDUCTIONS, "renorm")
_FLOAT_FUNCTIONAL = (
    *("interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax", "gelu"),
    *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss"),
    *("mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss"),
    *("nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss"),
    "ctc_loss",
)
_FLOAT_METHODS = ("__pow__", "__rpow__", "cpu")

_WIDEST = (
    *("addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul"),
    *("eq", "equal", "ge", "gt", "le", "lt", "ne", "cat", "stack", "vdot", "einsum", "tensordot"),
)
# Not among them: `2 / x`, which torch computes as `x.reciprocal() * 2`; the reciprocal makes it fp32, as in apex.
_WIDEST_METHODS = ("sub", "__rsub__", "__eq__")
_BANNED_FUNCTIONAL = ("binary_cross_entropy",)


def _listed() -> Iterator[tuple[Cast, Any, Iterable[str]]]:
    """(cast, module or class, names). Names that torch or Tensor does not have are skipped: not all exist on both."""
    for owner in (torch, torch.Tensor):
        yield Cast.HALF, owner, _HALF
        yield Cast.FLOAT, owner, _FLOAT
        yield Cast.WIDEST, owner, _WIDEST
        yield Cast.NOT_HALF, owner, [name + "_" for name in _FLOAT]
        yield Cast.SELF, owner, [name + "_" for name in (*_HALF, *_WIDEST)]
    yield Cast.HALF, torch, _RNNS
    yield Cast.HALF, F, _HALF_FUNCTIONAL
    yield Cast.FLOAT, F, _FLOAT_FUNCTIONAL
    yield Cast.BANNED, F, _BANNED_FUNCTIONAL
    yield Cast.FLOAT, torch.Tensor, _FLOAT_METHODS
    yield Cast.WIDEST, torch.Tensor, _WIDEST_METHODS
    yield Cast.NOT_HALF, torch.Tensor, ("__ipow__",)


# The cast of each listed function, by the function object that torch passes to a TorchFunctionMode. Made on import:
# backend="apex" replaces these functions later.
O1_LISTS = MappingProxyType(
    {getattr(owner, name): cast for cast, owner, names in _listed() for name in names if hasattr(owner, name)}
)


# -- additions to the lists ------------------------------------------------------------------------------------

_MARK = "halfmesh_cast"
# An operator of torch.ops with all its overloads, and one overload.
_TORCH_OPS = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)


class CastTable:
    """The cast lists of O1, as `engine.casts`. Additions apply to this engine only, from its next call on."""

    def __init__(self) -> None:
        self._casts = dict(O1_LISTS)
        # Weights that were cast in an earlier generation are cast again.
        self.generation = 0

    def get(self, function: Callable[..., Any]) -> Cast | None:
        """Return the cast of `function`, or None if its arguments are not cast."""
        cast = self._casts.get(function)
        return getattr(function, _MARK, None) if cast is None and type(function) is FunctionType else cast

    def forget_weights(self) -> None:
        """Drop cached casts in all scopes, because weights changed or a backward freed their graph."""
        self.generation += 1

    def register_half_function(self, module: Any, name: str) -> None:
        """Cast the floating-point tensors of `module.name` to fp16: `register_half_function(torch, "einsum")`.

        Raises:
            InputError: the function works in place, or torch does not report calls of it.
        """
        self._register(module, name, Cast.HALF, "half_function")

    def register_float_function(self, module: Any, name: str) -> None:
        """Cast the floating-point tensors of `module.name` to fp32.

        Raises:
            InputError: the function works in place, or torch does not report calls of it.
        """
        self._register(module, name, Cast.FLOAT, "float_function")

    def register_promote_function(self, module: Any, name: str) -> None:
        """Cast the floating-point tensors of `module.name` to fp32 if their dtypes differ.

        Raises:
            InputError: the function works in place, or torch does not report calls of it.
        """
        self._register(module, name, Cast.WIDEST, "promote_function")

    def _register(self, module: Any, name: str, cast: Cast, decorator: str) -> None:
        function = _find_function(module, name, decorator)
        self._casts[function] = cast
        if isinstance(function, _TORCH_OPS[0]):  # torch reports a call of it or of its overload
            self._casts.update((getattr(function, overload), cast) for overload in function.overloads())


def _find_function(module: Any, name: str, decorator: str) -> Any:
    """The function `module.name`, if torch reports calls of it to a TorchFunctionMode."""
    where, function = getattr(module, "__name__", repr(module)), getattr(module, name)
    if name.endswith("_"):
        raise InputError(f"{where}.{name} works in place; name the function that returns the result")
    reported = isinstance(function, _TORCH_OPS) or hasattr(function, _MARK) or function in O1_LISTS
    if not reported and not any(function in group for group in overrides.get_overridable_functions().values()):
        raise InputError(
            f"torch does not report calls of {where}.{name}; wrap it: {where}.{name} = "
            f"halfmesh.{decorator}({where}.{name})"
        )
    return function


def half_function(function: _Function) -> _Function:
    """Decorate `function` so that mode apex with opt_level O1 casts its floating-point tensors to fp16.

    In all other modes the function is unchanged.
    """
    return _marked(function, Cast.HALF)


def float_function(function: _Function) -> _Function:
    """Decorate `function` so that mode apex with opt_level O1 casts its floating-point tensors to fp32.

    In all other modes the function is unchanged.
    """
    return _marked(function, Cast.FLOAT)


def promote_function(function: _Function) -> _Function:
    """Decorate `function` so that mode apex with opt_level O1 casts floating-point tensors of different dtypes to fp32.

    In all other modes the function is unchanged.
    """
    return _marked(function, Cast.WIDEST)


def _marked(function: _Function, cast: Cast) -> _Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        flat = (*args, *kwargs.values())
        if overrides.has_torch_function(flat):  # a mode is active: it casts, and calls `function`
            return overrides.handle_torch_function(call, flat, *args, **kwargs)
        return function(*args, **kwargs)

    setattr(call, _MARK, cast)
    return call  # type: ignore[return-value]


# -- the scope -------------------------------------------------------------------------------------------------

_DATA: Any = torch.Tensor.data
# The operators of fused optimizers. Neither these nor writes through `param.data` count as changes of a tensor.
_FUSED_STEPS = frozenset(getattr(torch, n) for n in dir(torch) if n.startswith("_fused_") and n.endswith("_"))


@contextmanager
def o1_scope(table: CastTable, device_type: str) -> Iterator[None]:
    """Cast by `table` inside. `torch.autocast(enabled=False)` within turns the casts off.

    Inside, `torch.is_autocast_enabled(device_type)` is true, so that `custom_fwd`, activation checkpointing and
    `autocast(enabled=False)` in a model work. torch's own lists do not act, because autocast is off around each
    function that runs. They do act under an inner autocast with another dtype, and inside TorchScript and operators of
    `torch.ops`, which no TorchFunctionMode sees. `torch.compile` cannot follow the casts.
    """
    with torch.autocast(device_type, torch.float16, cache_enabled=False), O1Casts(table, device_type):
        yield


class O1Casts(TorchFunctionMode):
    """Applies the casts of `table` to tensors on `device_type` while torch's autocast is enabled there for fp16.

    An instance belongs to one scope in one thread. Entered alone, without autocast, it casts nothing: backward runs in
    it, so that activation checkpointing, which enables autocast as the forward had it, computes the same again.
    """

    def __init__(self, table: CastTable, device_type: str) -> None:
        super().__init__()
        self._table = table
        self._device_type = device_type
        self._is_on_device = attrgetter(f"is_{device_type}")
        self._weights: dict[torch.Tensor, tuple[tuple[int, ...], torch.Tensor]] = {}
        self._inlined: set[Callable[..., Any]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is MethodWrapperType:  # an attribute, such as x.shape
            if func.__self__ is _DATA:
                self._weights.pop(args[0], None)
            return func(*args, **kwargs)
        if func in _FUSED_STEPS:
            self._table.forget_weights()
        device = self._device_type
        active = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        cast, in_python = self._table.get(func), type(func) is FunctionType
        if in_python and hasattr(func, _MARK):
            if active:
                args, kwargs = self._apply(cast, func, args, kwargs)
            with self:
                return func.__wrapped__(*args, **kwargs)
        if in_python and func in BACKWARD:
            with torch.autocast(self._device_type, enabled=False):
                return self._run_inlined(func, args, kwargs)
        if not active or (cast is None and isinstance(func, _TORCH_OPS)):
            return func(*args, **kwargs)
        if in_python and cast is None and func not in self._inlined:
            return self._run_inlined(func, args, kwargs)
        torch.set_autocast_enabled(self._device_type, False)
        try:
            if cast is not None:
                args, kwargs = self._apply(cast, func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(self._device_type, True)

    def _run_inlined(self, func: FunctionType, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a Python function of torch so that this mode sees each function that it calls, but not itself again."""
        self._inlined.add(func)  # some call themselves in another way
        try:
            with self:
                return without_override(func)(*args, **kwargs)
        finally:
            self._inlined.discard(func)

    def _apply(self, cast: Cast | None, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments in the dtypes that `cast` requires, or in the dtype of `out`, which is written in place."""
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor) and self._is_eligible(out) and not hasattr(func, _MARK):
            return self._to(out.dtype, args, kwargs)
        if cast is Cast.HALF:
            return _map_arguments(self._to_half, args, kwargs)
        if cast is Cast.FLOAT:
            return self._to(torch.float32, args, kwargs)
        if cast is Cast.SELF or cast is Cast.NOT_HALF:
            first = args[0] if args else kwargs.get("input")
            if not isinstance(first, torch.Tensor) or not self._is_eligible(first):
                return args, kwargs
            if cast is Cast.NOT_HALF and first.dtype == torch.float16:
                raise NotImplementedError(
                    f"{func.__name__} changes an fp16 tensor in place, but O1 computes it in fp32; use the "
                    "out-of-place form, or call it on x.float()"
                )
            return self._to(first.dtype, args, kwargs)
        dtypes: set[torch.dtype] = set()
        _map_arguments(lambda t: dtypes.add(t.dtype) if self._is_eligible(t) else None, args, kwargs)
        if cast is Cast.BANNED and torch.float16 in dtypes:
            raise NotImplementedError(
                f"{func.__name__} with fp16 arguments is not safe under O1, because their logarithms overflow near 0 "
                "and 1: use binary_cross_entropy_with_logits, or cast the arguments with .float()"
            )
        mixed = len(dtypes) > 1 and torch.float64 not in dtypes  # doubles are left to torch's type promotion
        return self._to(torch.float32, args, kwargs) if mixed and cast is Cast.WIDEST else (args, kwargs)

    def _to(self, dtype: torch.dtype, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return _map_arguments(lambda t: t.to(dtype) if self._is_eligible(t) else t, args, kwargs)

    def _to_half(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float16 or not self._is_eligible(tensor):
            return tensor
        if not isinstance(tensor, nn.Parameter) or tensor.is_inference():
            return tensor.to(torch.float16)
        with_grad = tensor.requires_grad and torch.is_grad_enabled()
        stamp = self._table.generation, with_grad, *edit_stamp(tensor)
        known = self._weights.get(tensor)
        if known is not None and known[0] == stamp:
            return known[1]
        half = tensor.to(torch.float16)
        transformed = half.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(half)
        if type(half) is torch.Tensor and not transformed:  # which is of no use outside of its transform
            self._weights[tensor] = stamp, half
        return half

    def _is_eligible(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and self._is_on_device(tensor)


def _map_arguments(
    cast: Callable[[torch.Tensor], Any], args: Any, kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    return [_map(cast, value) for value in args], {name: _map(cast, value) for name, value in kwargs.items()}


def _map(cast: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `cast` to a tensor, or to those in a list or tuple."""
    if isinstance(value, torch.Tensor):
        return cast(value)
    return type(value)([_map(cast, item) for item in value]) if type(value) in (list, tuple) else value
