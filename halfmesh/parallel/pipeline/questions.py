"""What a forward asks for while it is traced: shapes, which are answered, and where it asks for what cannot be."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from ..._torch import shapes_only
from ...tensors import map_tensors, tensors_of

_METHODS = ("size", "dim", "numel", "nelement", "ndimension")
_ATTRIBUTES = ("shape", "ndim")
_PLAIN = ("_operator", "builtins", "math")
_NOT_ITS_OWN = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))

Place = tuple[str, int]
"""A file, and a line of it."""


class Asks(BaseException):
    """A forward asks for a truth that follows from shapes. (No Exception: a forward may catch those.)"""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node)
        self.node = node


def is_of_shapes(node: fx.Node) -> bool:
    """Whether the value of `node` follows from shapes of tensors, and from lengths, alone."""
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    if node.target is len or (node.target is getattr and node.args[1] in _ATTRIBUTES):
        return True
    parents = node.all_input_nodes
    plain = getattr(node.target, "__module__", None) in _PLAIN and node.target is not getattr
    return plain and bool(parents) and all(is_of_shapes(parent) for parent in parents)


def answer(node: fx.Node, model: nn.Module, values: Mapping[str, Any]) -> bool:
    """The truth of `node`, in an unfinished graph of `model`, for arguments with the shapes of `values`. Nothing is
    computed.

    Raises:
        Exception: it depends on data.
    """
    device = next((tensor.device for tensor in tensors_of(dict(values))), torch.device("cpu"))

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.inference_mode(False), torch.no_grad(), shapes_only():
        weights = {f"model.{name}": fake(tensor) for name, tensor in tensors.items()}
        found: bool = torch.func.functional_call(_Asked(model), weights, (node, map_tensors(fake, dict(values))))
    return found


class _Asked(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, node: fx.Node, values: Mapping[str, Any]) -> bool:
        run = fx.Interpreter(self.model, garbage_collect_values=False, graph=node.graph)
        for each in node.graph.nodes:
            run.env[each] = values[str(each.target)] if each.op == "placeholder" else run.run_node(each)
        return bool(run.env[node])


@contextmanager
def recorded_len(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The `len` that the forwards of `modules` call is recorded, where it is asked for something without a value."""
    functions = [getattr(module.forward, "__func__", module.forward) for module in modules]
    places = [names for function in functions if "len" not in (names := getattr(function, "__globals__", {"len": 0}))]
    for names in places:
        names["len"] = _len
    try:
        yield
    finally:
        for names in places:
            names.pop("len", None)  # several forwards may be of one file


def _len(value: Any) -> Any:
    if isinstance(value, fx.Proxy):
        return value.tracer.create_proxy("call_function", len, (value,), {})
    return len(value)


def form(value: Any) -> Any:
    """The shapes of the tensors in `value`, and the lengths of its containers."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, form(item)) for key, item in value.items())
    return tuple(map(form, value)) if isinstance(value, (list, tuple)) else None


def place_of_call() -> Place | None:
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
