"""The graph of a model's forward, recorded by torch.fx, in which an `if` or `assert` may depend on shapes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode

from ...errors import InputError
from ...utils.tensors import leaves_of, tensors_of
from ..rng import CPU, random_state, same_state
from ..trial import run_without_data, unchanged
from .partition import plain_values

_METHODS = ("size", "dim", "numel", "nelement", "ndimension")
_ATTRIBUTES = ("shape", "ndim")
_PLAIN = ("_operator", "builtins", "math")

_MAKERS: tuple[Callable[..., Any], ...] = (
    *(torch.tensor, torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tril_indices, torch.triu_indices),
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.randperm),
)
"""Functions that make a tensor from sizes."""

_MOST_UNDONE = 32
"""Answers that are taken back before an error counts as the forward's: there are 2**conditions of them."""


def trace(
    model: nn.Module, opened: Sequence[nn.Module], fixed: Mapping[str, Any], values: Mapping[str, Any] | None = None
) -> fx.Graph:
    """The graph of `model`. The modules in `opened` are traced; calls of others are nodes of the graph.

    Args:
        fixed: arguments of the forward with their values. All others are placeholders with their names.
        values: all arguments, of which only the shapes count. If None, a condition on shapes is False, unless that is
            an error.

    Raises:
        Exception: any error of the forward because values are not known.
    """
    answers: list[bool] = []
    undone = 0
    while True:
        try:
            return _record(model, opened, fixed, answers)
        except _ShapeCondition as condition:
            answers.append(values is not None and _evaluate(condition, model, values))
        except (TraceError, TypeError, InputError):  # whatever the answers are
            raise
        except Exception:
            while answers and answers[-1]:
                answers.pop()
                undone += 1
            if values is not None or not answers or undone > _MOST_UNDONE:
                raise
            answers[-1] = True


def _record(
    model: nn.Module, opened: Sequence[nn.Module], fixed: Mapping[str, Any], answers: Sequence[bool]
) -> fx.Graph:
    """The graph, with `answers` for the first conditions on shapes. Raises _ShapeCondition with the next one."""
    tracer = _Tracer(opened, inspect.signature(model.forward), answers)
    before, state = plain_values(opened), random_state(CPU)
    with unchanged(opened), _Makers(tracer):
        graph = tracer.trace(model, concrete_args=dict(fixed))
        _reject_kept(opened)
        if plain_values(opened) != before or not same_state(random_state(CPU), state):
            raise InputError("it changes numbers or flags on the model, or draws random numbers for itself")
    return graph


class _Proxy(fx.Proxy):
    """Records `x += y` unchanged, because it changes a tensor under all its names. (fx makes x = x + y of it.)"""


def _record_update(name: str) -> Callable[[Any, Any], Any]:
    """Make proxies record the function `name` of operator, and return the function that they record."""

    def update(value: Any, other: Any) -> Any:  # fx would write operator's as a statement, which replaces a tuple
        return getattr(operator, name)(value, other)

    def record(proxy: _Proxy, other: Any) -> Any:
        if is_of_shapes(proxy.node):
            return NotImplemented  # of a number Python then makes a new one
        return proxy.tracer.create_proxy("call_function", update, (proxy, other), {})

    update.__name__ = name
    setattr(_Proxy, f"__{name}__", record)
    return update


UPDATES = [_record_update(name) for name in fx.graph.inplace_methods if name != "setitem"]
"""`x += y` and the like."""


class _Tracer(fx.Tracer):
    """Traces the modules in `opened`, and no others."""

    proxy_buffer_attributes = True  # else a value computed from a buffer would be a constant

    def __init__(self, opened: Sequence[nn.Module], signature: inspect.Signature, answers: Sequence[bool]) -> None:
        super().__init__(autowrap_functions=_MAKERS, param_shapes_constant=True)
        self._autowrap_search.append(torch)  # torch.ones(n, n) would fail before `_Makers` sees it
        self._answers = iter(answers)
        self._opened = set(opened)
        self._signature = signature
        self._modes = _modes()

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return module not in self._opened

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """The truth of a value in an `if`, an `assert` and the like."""
        if not is_of_shapes(obj.node):
            return super().to_bool(obj)  # raises
        for found in self._answers:
            return found
        raise _ShapeCondition(obj.node)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """The values of fixed arguments, and placeholders for others. (fx would add checks, and flatten tuples.)"""
        fixed = concrete_args or {}
        names = self._signature.parameters
        values = {n: fixed[n] if n in fixed else self.create_proxy("placeholder", n, (), {}) for n in names}
        bound = inspect.BoundArguments(self._signature, values)
        return partial(root_fn, self.root, *bound.args, **bound.kwargs), []

    def create_arg(self, value: Any) -> Any:
        """Tensors that are on no module fx would add to the model."""
        arg: Any = super().create_arg(value)
        if isinstance(value, torch.Tensor) and str(arg.target).startswith("_tensor_constant"):
            raise InputError("it uses a tensor that is not part of the model; make it a buffer")
        return arg

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Proxy:
        if _modes() != self._modes:
            name = getattr(target, "__name__", target)
            raise InputError(f"{name} is called inside no_grad, autocast or similar, which a trace does not record")
        return super().create_proxy(kind, target, *args, **kwargs)


class _Makers(TorchFunctionMode):
    """Records functions that make a tensor from none, such as torch.rand; their result would be a constant."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAKERS and hasattr(self._tracer, "graph"):
            return self._tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _modes() -> tuple[bool, ...]:
    """The global modes that a with-statement around a call may change."""
    devices = ("cpu", "cuda")
    autocast = (bool(torch.is_autocast_enabled(device)) for device in devices)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _reject_kept(modules: Iterable[nn.Module]) -> None:
    """Raise InputError for values that the forward has put on modules, or into their buffers, lists and dicts."""
    for module in modules:
        for name, value in (module._buffers | vars(module)).items():
            if leaves_of(value, fx.Proxy):
                raise InputError(f"it keeps a value on the model ({name}); change a buffer in place (table.add_)")


# -- conditions on shapes ----------------------------------------------------------------------------------------------


class _ShapeCondition(BaseException):
    """Raised at a condition on shapes, a node, in a forward. (Not an Exception, which the forward may catch.)"""


def is_of_shapes(node: fx.Node) -> bool:
    """Return True if the value of `node` depends on the shapes of tensors only."""
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr and node.args[1] in _ATTRIBUTES:
        return True
    parents = node.all_input_nodes
    plain = getattr(node.target, "__module__", None) in _PLAIN and node.target is not getattr
    return plain and bool(parents) and all(is_of_shapes(parent) for parent in parents)


def _evaluate(condition: _ShapeCondition, model: nn.Module, values: Mapping[str, Any]) -> bool:
    """Return True if the condition is true for arguments with the shapes of `values`. Nothing is computed."""

    def compute(node: fx.Node, values: Mapping[str, Any]) -> bool:
        run = fx.Interpreter(model, garbage_collect_values=False, graph=node.graph)
        for each in node.graph.nodes:
            run.env[each] = values[str(each.target)] if each.op == "placeholder" else run.run_node(each)
        return bool(run.env[node])

    device = next((tensor.device for tensor in tensors_of(dict(values))), torch.device("cpu"))
    try:
        found: bool = run_without_data(model, compute, device, condition.args[0], dict(values))
    except Exception as error:
        message = f"it reads a shape that depends on data: {error}"
        raise InputError(message).with_traceback(condition.__traceback__) from error
    return found
