"""apex's O1 lists: which torch functions run in fp16, which in fp32, which in the widest dtype of their arguments.

The names are those of apex.amp (its lists/functional_overrides, torch_overrides and tensor_overrides). Added here:
`scaled_dot_product_attention`, which is younger than apex, runs in fp16 as under `torch.autocast`; `vdot`, `einsum` and
`tensordot` take the widest dtype where apex failed on mixed ones. Different here: `h += f` keeps the dtype of `h`; apex
made a new fp32 tensor of it, which views of `h` did not see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from types import FunctionType, MappingProxyType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import overrides

from .. import torch_private
from ..errors import InputError, did_you_mean

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Cast(Enum):
    """What happens to the floating-point arguments of a function."""

    HALF = "all to fp16; parameters once per scope"
    FLOAT = "all to fp32"
    WIDEST = "all to fp32 if they are mixed"
    SELF = "all to the dtype of the first, which is changed in place"
    NOT_HALF = "refused if the first, which is changed in place, is fp16"
    BANNED = "refused if one is fp16"


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

_COMPARISONS = ("eq", "equal", "ge", "gt", "le", "lt", "ne")
_WIDEST = (
    *("addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul", *_COMPARISONS, "cat", "stack"),
    *("vdot", "einsum", "tensordot"),
)
_WIDEST_METHODS = ("sub", "__rsub__", "__eq__")
"""Not among them: `2 / x`, which torch writes as `x.reciprocal() * 2`; the reciprocal makes it fp32, as in apex."""
_BANNED_FUNCTIONAL = ("binary_cross_entropy",)

_OPERATORS = (
    {"__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul", "__matmul__": "matmul"}
    | {"__truediv__": "div", "__div__": "div", "__mod__": "remainder", "__neg__": "neg"}
    | {"__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge"}
    | {"__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_", "__itruediv__": "div_", "__ipow__": "pow_"}
)
"""torch reports calls of these operators of Tensor as calls of these methods; of the others as what they are."""


def _in_place(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name + "_" for name in names)


def _listed() -> Iterator[tuple[Cast, Any, Iterable[str]]]:
    """(cast, where, names). A name that torch or its tensors do not have is passed over: not all exist on both."""
    for module in (torch, torch.Tensor):
        yield Cast.HALF, module, _HALF
        yield Cast.FLOAT, module, _FLOAT
        yield Cast.WIDEST, module, _WIDEST
        yield Cast.NOT_HALF, module, _in_place(_FLOAT)
        yield Cast.SELF, module, _in_place((*_HALF, *_WIDEST))
    yield Cast.HALF, torch, _RNNS
    yield Cast.HALF, F, _HALF_FUNCTIONAL
    yield Cast.FLOAT, F, _FLOAT_FUNCTIONAL
    yield Cast.BANNED, F, _BANNED_FUNCTIONAL
    yield Cast.FLOAT, torch.Tensor, _FLOAT_METHODS
    yield Cast.WIDEST, torch.Tensor, _WIDEST_METHODS
    yield Cast.NOT_HALF, torch.Tensor, ("__ipow__",)


@functools.cache
def o1_lists() -> Mapping[Callable[..., Any], Cast]:
    """The cast of each listed function, by the function object that a TorchFunctionMode is called with."""
    found = {
        getattr(module, name): cast for cast, module, names in _listed() for name in names if hasattr(module, name)
    }
    return MappingProxyType(found)


class CastTable:
    """O1's lists with additions: functions that this model wants to have in fp16, in fp32 or in the widest dtype.

    Additions hold for one engine, from the next call on. Nothing in torch is replaced.
    """

    def __init__(self) -> None:
        self._casts = dict(o1_lists())
        self._scopes: WeakSet[Any] = WeakSet()

    def get(self, function: Callable[..., Any]) -> Cast | None:
        """The cast of `function`, or None if its arguments stay as they are."""
        cast = self._casts.get(function)
        return getattr(function, _MARK, None) if cast is None and type(function) is FunctionType else cast

    def watch(self, scope: Any) -> None:
        """Call `scope.forget()` with `forget_weights`, as long as `scope` lives."""
        self._scopes.add(scope)

    def forget_weights(self) -> None:
        """The weights have changed, or their casts have done their work: drop those of all scopes."""
        for scope in list(self._scopes):
            scope.forget()

    def register_half_function(self, module: Any, name: str) -> None:
        """Run `module.name` in fp16; e.g. `register_half_function(torch, "einsum")`.

        Raises:
            InputError: there is no such function, it works in place, or torch does not report calls of it.
        """
        self._register(module, name, Cast.HALF, "half_function")

    def register_float_function(self, module: Any, name: str) -> None:
        """Run `module.name` in fp32; raises InputError as `register_half_function` does."""
        self._register(module, name, Cast.FLOAT, "float_function")

    def register_promote_function(self, module: Any, name: str) -> None:
        """Run `module.name` in fp32 if its arguments are mixed; raises InputError as `register_half_function` does."""
        self._register(module, name, Cast.WIDEST, "promote_function")

    def _register(self, module: Any, name: str, cast: Cast, decorator: str) -> None:
        function = _find(module, name, decorator)
        self._casts[function] = cast
        if torch_private.is_operator(function) and hasattr(function, "overloads"):  # calls are reported as either
            self._casts.update((getattr(function, overload), cast) for overload in function.overloads())


def half_function(function: _Function) -> _Function:
    """Decorator: under O1, call `function` with its floating-point tensors in fp16. Elsewhere it changes nothing."""
    return _marked(function, Cast.HALF)


def float_function(function: _Function) -> _Function:
    """Decorator: under O1, call `function` with its floating-point tensors in fp32. Elsewhere it changes nothing."""
    return _marked(function, Cast.FLOAT)


def promote_function(function: _Function) -> _Function:
    """Decorator: under O1, call `function` with mixed floating-point tensors in fp32. Elsewhere it changes nothing."""
    return _marked(function, Cast.WIDEST)


def is_marked(function: Callable[..., Any]) -> bool:
    """Whether one of the decorators above made `function`."""
    return hasattr(function, _MARK)


def unmarked(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `function`, made by one of the decorators above, was made from."""
    return function.__wrapped__  # type: ignore[attr-defined]


_MARK = "halfmesh_cast"


def _marked(function: _Function, cast: Cast) -> _Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        flat = (*args, *kwargs.values())
        if overrides.has_torch_function(flat):  # a mode is listening: it casts, and calls `function`
            return overrides.handle_torch_function(call, flat, *args, **kwargs)
        return function(*args, **kwargs)

    setattr(call, _MARK, cast)
    return call  # type: ignore[return-value]


def _find(module: Any, name: str, decorator: str) -> Callable[..., Any]:
    """The function `module.name`, if torch reports calls of it to a TorchFunctionMode."""
    where = getattr(module, "__name__", repr(module))
    if module is torch.Tensor:
        name = _OPERATORS.get(name, name)
    function: Any = getattr(module, name, None)
    if not callable(function):
        near = did_you_mean(name, [other for other in dir(module) if not other.startswith("_")])
        raise InputError(f"{where} has no function {name!r}{near}")
    if name.endswith("_") and not name.endswith("__"):
        raise InputError(f"{where}.{name} works in place, which would be lost in a cast; name a function that does not")
    reported = torch_private.is_operator(function) or is_marked(function) or function in o1_lists()
    if not reported and not any(function in group for group in overrides.get_overridable_functions().values()):
        raise InputError(
            f"torch does not report calls of {where}.{name}, so it cannot be cast from outside; decorate it where it "
            f"is defined with @halfmesh.{decorator}, or wrap it: {where}.{name} = halfmesh.{decorator}({where}.{name})"
        )
    return function
