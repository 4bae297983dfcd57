"""The graph of a model's forward, by torch.fx."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ...errors import InputError
from .graph_pieces import UPDATES
from .questions import Asks, answer, at, is_models_own, is_of_shapes, place_of_call, recorded_len

_MOST_ANSWERS = 256
_MOST_TRIES = 64
_MAKERS = {
    *(torch.tensor, torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tril_indices, torch.triu_indices),
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.randperm),
}


def trace(
    model: nn.Module, points: Sequence[str], fixed: Mapping[str, Any], values: Mapping[str, Any] | None = None
) -> tuple[fx.Graph, tuple[bool, ...]]:
    """What `model` computes; of its modules only those are looked into that hold one of `points`. And the answers to
    what its forward asks about shapes, in `if` and `assert`, with which the graph was made.

    Args:
        fixed: arguments of the forward with their values. All others are placeholders, which have their names.
        values: of those others; only their shapes count. Without them answers are tried until the forward comes to its
            end.

    Raises:
        Exception: whatever the forward raises because values are not known.
    """
    answers: list[bool] = []
    failed: list[Exception] = []
    while True:
        try:
            return _record(model, points, fixed, answers), tuple(answers)
        except Asks as question:
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


def _answer(question: Asks, model: nn.Module, values: Mapping[str, Any]) -> bool:
    try:
        with unchanged(model.modules()):
            return answer(question.node, model, values)
    except Exception as error:
        message = f"it asks for a shape that is not known without data: {error}"
        raise InputError(message).with_traceback(question.__traceback__) from error


def _record(model: nn.Module, points: Sequence[str], fixed: Mapping[str, Any], answers: Sequence[bool]) -> fx.Graph:
    """The graph with these answers to the first questions. Raises Asks with the next one."""
    tracer = _Tracer(points, inspect.signature(model.forward), answers)
    modules = [module for _, module in opened(model, points)]
    with unchanged(modules), _Makers(tracer), recorded_len(modules):
        before, drawn = [dict(vars(module)) for module in modules], _random_states()
        graph = tracer.trace(model, concrete_args=dict(fixed))
        _refuse_kept(modules)
        changed = [name for own, module in zip(before, modules, strict=True) for name in _other_values(own, module)]
        if changed:
            raise InputError(f"it changes numbers or flags on the model ({', '.join(changed)})")
        if _random_states() != drawn:
            raise InputError("it draws random numbers of python or numpy")
        _fix_constants(graph, model)
    return graph


def opened(model: nn.Module, points: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules that are looked into, by name."""
    return [(name, module) for name, module in model.named_modules() if _holds_a_point(name, points)]


def plain_values(modules: Iterable[nn.Module]) -> str:
    """The numbers, flags and words on modules: a trace keeps what a forward has read of them."""
    return repr([_plain(vars(module)) for module in modules])


def _plain(own: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (bool, int, float, str, NoneType)
    return {name: value for name, value in own.items() if isinstance(value, kinds) and name != "training"}


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
        if not is_of_shapes(obj.node):
            return super().to_bool(obj)  # raises
        for found in self._answers:
            return found
        raise Asks(obj.node)

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
        proxy.node.meta["place"] = place_of_call()
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


def _other_values(own: Mapping[str, Any], module: nn.Module) -> list[str]:
    """The names whose plain values in `own`, what `module` had, differ from its present ones."""
    before, now = ({name: repr(value) for name, value in _plain(then).items()} for then in (own, vars(module)))
    return [name for name in before | now if before.get(name) != now.get(name)]


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
