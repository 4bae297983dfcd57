"""The graph of a model's forward, by torch.fx. What it asks about shapes, in `if` and `assert`, is answered."""

from __future__ import annotations

import copy
import inspect
import linecache
import operator
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ..._torch import shapes_only
from ...errors import InputError
from ...tensors import map_tensors, tensors_of

UPDATES = (
    *(operator.iadd, operator.isub, operator.imul, operator.imatmul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
)
"""They change tensors in place; of numbers they make others."""
_METHODS = ("size", "dim", "numel", "nelement", "ndimension")
_ATTRIBUTES = ("shape", "ndim")
_PLAIN = ("_operator", "builtins", "math")
_NOT_ITS_OWN = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))

Place = tuple[str, int]
"""A file, and a line of it."""

_MOST_ANSWERS = 256
_MOST_TRIES = 64
_MAKERS = {
    *(torch.tensor, torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tril_indices, torch.triu_indices),
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.randperm),
}


def trace(
    model: nn.Module, points: Sequence[str], fixed: Mapping[str, Any], values: Mapping[str, Any] | None = None
) -> fx.Graph:
    """What `model` computes; of its modules only those are looked into that hold one of `points`.

    Args:
        fixed: arguments of the forward with their values. All others are placeholders, which have their names.
        values: of those others; only their shapes count. Without them answers to what the forward asks about shapes are
            tried until it comes to its end.

    Raises:
        Exception: whatever the forward raises because values are not known.
    """
    answers: list[bool] = []
    failed: list[Exception] = []
    while True:
        try:
            return _record(model, points, fixed, answers)
        except _Question as question:
            if len(answers) == _MOST_ANSWERS:
                message = f"it asks for shapes more than {_MOST_ANSWERS} times"
                raise InputError(message).with_traceback(question.__traceback__) from None
            answers.append(values is not None and _answer(question, model, values))
        except Exception as error:
            failed.append(error)
            while answers and answers[-1]:
                answers.pop()
            if values is not None or not answers or len(failed) == _MOST_TRIES:
                raise next((error for error in failed if not is_models_own(error)), failed[0]) from None
            answers[-1] = True


def _record(model: nn.Module, points: Sequence[str], fixed: Mapping[str, Any], answers: Sequence[bool]) -> fx.Graph:
    """The graph with these answers to the first questions. Raises _Question with the next one."""
    tracer = _Tracer(points, inspect.signature(model.forward), answers)
    modules = [module for _, module in opened(model, points)]
    with unchanged(modules), _Makers(tracer):
        plain, drawn = plain_values(modules), _random_states()
        graph = tracer.trace(model, concrete_args=dict(fixed))
        _refuse_kept(modules)
        if plain_values(modules) != plain:
            raise InputError("it changes numbers or flags on the model")
        if _random_states() != drawn:
            raise InputError("it draws random numbers of python or numpy")
        _fix_constants(graph, model)
    return graph


def opened(model: nn.Module, points: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules that are looked into, by name."""
    return [(name, module) for name, module in model.named_modules() if _holds_a_point(name, points)]


def plain_values(modules: Iterable[nn.Module]) -> str:
    """The numbers, flags and strings on modules: a trace keeps what a forward has read of them."""
    kinds = (bool, int, float, str, NoneType)
    return repr([{n: value for n, value in vars(module).items() if isinstance(value, kinds)} for module in modules])


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What a forward sets on `modules`, or takes away, is put back; buffers and what is in lists and dicts, too."""
    owned = [vars(module) for module in modules]
    kept = [value for own in owned for value in own.values() if type(value) in (dict, list, set)]
    before = [(container, copy.copy(container)) for container in (*owned, *kept)]
    try:
        yield
    finally:
        for now, then in before:
            now.clear()
            (now.extend if isinstance(now, list) else now.update)(then)


def run_without_data(run: nn.Module, device: torch.device, *args: Any) -> Any:
    """What `run` returns for tensors of these shapes, as if all were on `device`. Nothing is computed or sent, and what
    it leaves on its modules is taken away.

    Raises:
        Exception: it asks for values.
    """

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
        )

    tensors = dict(run.named_parameters()) | dict(run.named_buffers())
    with torch.inference_mode(False), torch.enable_grad(), unchanged(run.modules()), shapes_only():
        weights = {name: fake(tensor) for name, tensor in tensors.items()}
        return torch.func.functional_call(run, weights, map_tensors(fake, args))


class _Proxy(fx.Proxy):
    """Keeps `x += y` as it is, which changes a tensor of other names, too. (fx makes x = x + y of it.)"""


def _updating(function: Any) -> Callable[[_Proxy, Any], Any]:
    return lambda proxy, other: proxy.tracer.create_proxy("call_function", function, (proxy, other), {})


for _function in UPDATES:
    setattr(_Proxy, f"__{_function.__name__}__", _updating(_function))


class _Tracer(fx.Tracer):
    """Looks into the modules that hold a split point, and into no other."""

    proxy_buffer_attributes = True  # else what is computed from a buffer would be kept as it was at the trace

    def __init__(self, points: Sequence[str], signature: inspect.Signature, answers: Sequence[bool]) -> None:
        super().__init__(param_shapes_constant=True)
        self._answers = iter(answers)
        self._points = points
        self._signature = signature
        self._modes = _modes()

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not _holds_a_point(name, self._points)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """In an `if`, an `assert` and the like."""
        if not _is_of_shapes(obj.node):
            return super().to_bool(obj)  # raises
        for found in self._answers:
            return found
        raise _Question(obj.node)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """The arguments' values, where they are known. (fx leaves checks of them in the graph, and walks tuples.)"""
        fixed = concrete_args or {}
        names = self._signature.parameters
        values = {n: fixed[n] if n in fixed else self.create_proxy("placeholder", n, (), {}) for n in names}
        bound = inspect.BoundArguments(self._signature, values)
        return partial(root_fn, self.root, *bound.args, **bound.kwargs), []

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Proxy:
        if _modes() != self._modes:
            name = getattr(target, "__name__", target)
            raise InputError(f"{name} is called within no_grad, autocast or the like, which a trace does not keep")
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        proxy.node.meta["place"] = _place_of_call()
        return proxy


class _Makers(TorchFunctionMode):
    """Records what makes tensors of no other, as torch.rand: else one tensor would be kept for all calls."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAKERS and hasattr(self._tracer, "graph"):
            return self._tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _holds_a_point(name: str, points: Sequence[str]) -> bool:
    """Whether it is the model ("") or the name of a module that has one of `points` within."""
    return not name or any(point.startswith(f"{name}.") for point in points)


def _modes() -> tuple[bool, ...]:
    """What with-statements around a call may change."""
    devices = ("cpu", "cuda")
    autocast = (bool(torch.is_autocast_enabled(device)) for device in devices)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _random_states() -> str:
    return repr((random.getstate(), np.random.get_state()))


def _refuse_kept(modules: Iterable[nn.Module]) -> None:
    """Raise InputError for what the forward has put on modules, or into their buffers, lists and dicts."""
    for module in modules:
        for name, value in vars(module).items():
            kept = _proxies(value)
            if kept and name != "_buffers":
                raise InputError(f"it keeps values on the model ({name}){at(kept[0].node.meta['place'])}")
        for name, value in module._buffers.items():
            for proxy in _proxies(value):
                raise InputError(
                    f"it assigns to the buffer {name}{at(proxy.node.meta['place'])}; change it in place: "
                    f"self.{name}.add_(...) for self.{name} += ..., self.{name}.copy_(...) for self.{name} = ..."
                )


def _proxies(value: Any) -> list[fx.Proxy]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else [value]
    return [item for item in inner if isinstance(item, fx.Proxy)]


def _fix_constants(graph: fx.Graph, model: nn.Module) -> None:
    """Tensors that the forward computed from no argument and no weight go into the graph: fx puts them on the model."""
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
            tensor = getattr(model, str(node.target))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_function(_constant(tensor)))
            graph.erase_node(node)


def _constant(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    def constant() -> torch.Tensor:
        return tensor

    return constant


# -- questions about shapes --------------------------------------------------------------------------------------------


class _Question(BaseException):
    """A forward asks for a truth that follows from shapes. (No Exception: a forward may catch those.)"""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node)
        self.node = node


def _is_of_shapes(node: fx.Node) -> bool:
    """Whether the value of `node` follows from shapes of tensors alone."""
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr and node.args[1] in _ATTRIBUTES:
        return True
    parents = node.all_input_nodes
    plain = getattr(node.target, "__module__", None) in _PLAIN and node.target is not getattr
    return plain and bool(parents) and all(_is_of_shapes(parent) for parent in parents)


def _answer(question: _Question, model: nn.Module, values: Mapping[str, Any]) -> bool:
    """The truth of what is asked, in an unfinished graph of `model`, for arguments with the shapes of `values`. Nothing
    is computed."""
    device = next((tensor.device for tensor in tensors_of(dict(values))), torch.device("cpu"))
    try:
        found: bool = run_without_data(_Unfinished(model), device, question.node, dict(values))
    except Exception as error:
        message = f"it asks for a shape that is not known without data: {error}"
        raise InputError(message).with_traceback(question.__traceback__) from error
    return found


class _Unfinished(nn.Module):
    """Computes one node of a graph that is being recorded."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, node: fx.Node, values: Mapping[str, Any]) -> bool:
        run = fx.Interpreter(self.model, garbage_collect_values=False, graph=node.graph)
        for each in node.graph.nodes:
            run.env[each] = values[str(each.target)] if each.op == "placeholder" else run.run_node(each)
        return bool(run.env[node])


# -- places in the code ------------------------------------------------------------------------------------------------


def _place_of_call() -> Place | None:
    """The line of the model's own code that is being executed."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_ITS_OWN):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def place_of_error(error: BaseException) -> Place | None:
    """The line of the model's own code at which `error` came up, if there is one."""
    places = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return next((place for place in reversed(places) if not place[0].startswith(_NOT_ITS_OWN)), None)


def at(place: Place | None) -> str:
    """Words for a place, in parentheses; none for None."""
    return f" (`{linecache.getline(*place).strip()}`, line {place[1]} of {place[0]})" if place else ""


def is_models_own(error: BaseException) -> bool:
    """Whether the model's code itself raised it, by `raise` or `assert`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return not last.filename.startswith(_NOT_ITS_OWN) and (last.line or "").startswith(("raise", "assert"))
