"""Splits models that no partitioner knows, at modules that the user names: torch.fx traces their forward.

Only the modules around the split points are traced; all others are called as usual. The graph shows the values that a
stage takes from earlier ones, for example of a residual connection. Values that depend on the model's arguments alone
(masks, positions, sizes) are computed by every stage that needs them.
"""

from __future__ import annotations

import inspect
import operator
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ...errors import InputError, did_you_mean, page
from ..trial import is_within
from .fx_trace import UPDATES, is_of_shapes, trace
from .partition import PLAIN, Call, Piece, plain_values, signature_of

_REGISTER = f"register a partitioner for the model (halfmesh.PARTITIONERS, see {page('Pipeline parallelism')})"
_HOUSE = os.path.dirname(__file__)
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "exponential", "cauchy", "geometric")


def split_at(model: nn.Module, points: Sequence[str]) -> list[Piece]:
    """The pieces of `model` that begin with the modules `points`, in the order of its forward.

    Raises:
        InputError: a point is not a module, is not called, or is called in another order; or the forward cannot be
            traced.
    """
    known = dict(model.named_modules())
    for point in points:
        if point not in known:
            raise InputError(f"partition: {point!r} is not a module of the model{did_you_mean(point, known)}")
    forward = _SplitForward(model, points)
    pieces = [
        Piece(name, uses, partial(forward.run, index), forward.prepare)
        for index, (name, uses) in enumerate(zip(("the beginning", *points), forward.uses, strict=True))
    ]
    if empty := [piece.name for piece in pieces if not piece.uses]:
        raise InputError(f"partition: no module is left for the stage of {empty[0]}; name other split points")
    return pieces


class _SplitForward:
    """One model's forward as a function for each piece, traced again for each kind of call.

    Attributes:
        uses: the modules and parameters of each piece, in a call without optional arguments.
    """

    def __init__(self, model: nn.Module, points: Sequence[str]) -> None:
        self._class = type(model).__name__
        self._points = points
        self._signature = inspect.signature(model.forward)
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if any(parameter.kind in kinds for parameter in self._signature.parameters.values()):
            raise InputError(f"{self._class}.forward takes *args or **kwargs, which cannot be traced; {_REGISTER}")
        # The modules that are traced: the model, and those that hold a point.
        names = [name for name, _ in model.named_modules()]
        self._opened = [n for n in names if not n or any(point.startswith(f"{n}.") for point in points)]
        self._functions: dict[str, list[Callable[[nn.Module, Mapping[str, Any]], Any]]] = {}
        needed = {n: ... for n, p in self._signature.parameters.items() if p.default is inspect.Parameter.empty}
        self.uses = [_uses_of(piece) for piece in self._trace(model, needed)]

    def prepare(self, model: nn.Module, call: Call) -> None:
        """Trace the model for calls like `call`, unless that is done.

        Raises:
            InputError: it cannot be traced, or a stage needs modules of another.
        """
        kind = self._kind(model, call)
        if kind in self._functions:
            return
        values = self._values(call)
        pieces = self._trace(model, values, values)
        for piece, first in zip(pieces, self.uses, strict=True):
            if new := [name for name in _uses_of(piece) if name not in first]:
                mode = "training" if model.training else "evaluation"
                raise InputError(
                    f"called with {', '.join(sorted(values))} in {mode}, a stage needs {', '.join(new)}, which it does "
                    f"not hold in the mode that the model is in at initialize, without optional arguments; {_REGISTER}"
                )
        self._functions[kind] = list(map(_compile, pieces))

    def run(self, index: int, model: nn.Module, call: Call, activations: Any) -> Any:
        """Run piece `index`. It takes and returns values by name; the last one returns the model's output."""
        functions = call.once("functions", lambda: self._functions[self._kind(model, call)])
        return functions[index](model, self._values(call) | (activations or {}))

    def _values(self, call: Call) -> dict[str, Any]:
        return self._signature.bind(*call.args, **call.kwargs).arguments

    def _kind(self, model: nn.Module, call: Call) -> str:
        """The key of a trace: shapes, plain arguments, and plain attributes such as `training`."""
        return f"{signature_of(call)} {plain_values(map(model.get_submodule, self._opened))}"

    def _trace(
        self, model: nn.Module, arguments: Mapping[str, Any], values: Mapping[str, Any] | None = None
    ) -> list[fx.Graph]:
        """The pieces of the forward for `arguments` with the shapes of `values`; None: with any shapes."""
        fixed = {n: p.default for n, p in self._signature.parameters.items() if n not in arguments}
        fixed |= {n: v for n, v in arguments.items() if isinstance(v, PLAIN)}
        opened = [model.get_submodule(name) for name in self._opened]
        try:
            graph = trace(model, opened, fixed, values)
        except Exception as error:  # any error that the forward raises because values are not known
            frames = traceback.extract_tb(error.__traceback__)
            lines = [f" (`{at.line}`, line {at.lineno} of {at.filename})" for at in frames if _is_models(at.filename)]
            raise InputError(
                f"{self._class}.forward cannot be traced for split points: {error}{''.join(lines[-1:])}. Move code "
                "that reads values, keeps them, or uses no_grad or autocast into a module that is not a split point, "
                f"or {_REGISTER}"
            ) from error
        return _cut(graph, self._points)


def _is_models(file: str) -> bool:
    return not file.startswith((_HOUSE, os.path.dirname(torch.__file__)))


def _compile(graph: fx.Graph) -> Callable[[nn.Module, Mapping[str, Any]], Any]:
    """The graph as a function of a model with its modules and weights, and of values by name."""
    for node in graph.nodes:
        node.meta.pop("is_wrapped", None)  # else the code registers the function with fx, for all later traces
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)
    inputs = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return lambda model, values: names["forward"](model, *(values[name] for name in inputs))


# -- a graph in pieces -----------------------------------------------------------------------------------------------


def _uses_of(graph: fx.Graph) -> tuple[str, ...]:
    """The modules and parameters of a graph."""
    return tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")))


def _cut(graph: fx.Graph, points: Sequence[str]) -> list[fx.Graph]:
    """The graph in pieces: each from one split point to the next."""
    nodes = list(graph.nodes)
    begins: dict[str, int] = {}
    for position, node in enumerate(nodes):
        for point in points if node.op == "call_module" else ():
            if is_within(str(node.target), point):
                begins.setdefault(point, position)
    if missing := [point for point in points if point not in begins]:
        raise InputError(f"partition: {', '.join(missing)} is never called by the model's forward")
    starts = [begins[point] for point in points]
    if starts != sorted(starts):
        order = ", ".join(sorted(points, key=lambda point: begins[point]))
        raise InputError(f"partition: the forward calls these modules in the order {order}; name them in that order")
    piece_of: dict[fx.Node, int] = {}  # every stage computes nodes that are not in it
    firsts: dict[fx.Node, fx.Node] = {}  # of the results of changes in place: the first name of the changed value
    for position, node in enumerate(nodes):
        if not _follows_from_arguments(node, piece_of):
            piece_of[node] = sum(position >= start for start in starts)
        if (changed := _changed_by(node)) is not None:
            first = firsts[node] = firsts.get(changed, changed)
            names = [first, *(name for name in firsts if firsts[name] is first)]
            others = [name for name in names if name not in (node, changed) and any(user > node for user in name.users)]
            _reject_change(node, changed, piece_of, others)
    return [_piece_graph(nodes, piece_of, index, len(points)) for index in range(len(points) + 1)]


def _follows_from_arguments(node: fx.Node, piece_of: Mapping[fx.Node, int]) -> bool:
    """Return True if a node needs no weights, no random numbers and nothing of a piece."""
    name = str(getattr(node.target, "__name__", node.target))
    return node.op == "placeholder" or (
        node.op in ("call_function", "call_method")
        and not any(word in name for word in _RANDOM)
        and not any(parent in piece_of for parent in node.all_input_nodes)
    )


def _reject_change(node: fx.Node, changed: fx.Node, piece_of: Mapping[fx.Node, int], others: Sequence[fx.Node]) -> None:
    """Raise InputError if `node` changes a value in place that other stages have a copy of.

    Args:
        others: other names of `changed` that are used later. Each is sent to later stages by itself.
    """
    is_of_weights = changed.op == "get_attr"
    if changed not in piece_of:
        is_safe = _has_one_name(changed, node)
    else:
        is_safe = piece_of[changed] == piece_of[node] or not (is_of_weights or others)
    if is_safe:
        return
    name = changed.target if is_of_weights else changed
    raise InputError(
        f"partition: the forward changes {name} in place ({node.name}), but other stages have a copy of it; use the "
        "out-of-place form, or change a buffer where it is first used, or in a separate module"
    )


def _has_one_name(node: fx.Node, user: fx.Node) -> bool:
    """Return True if nothing but `user` can read the memory of `node`, which every stage computes."""
    if node.op == "placeholder" or any(not is_of_shapes(other) for other in node.users if other is not user):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    computes = node.target in (*UPDATES, *vars(operator).values()) and name not in ("getitem", "pos")
    is_new = computes or name == "clone" or name.endswith("_like")
    return is_new or all(is_of_shapes(parent) or _has_one_name(parent, node) for parent in node.all_input_nodes)


def _changed_by(node: fx.Node) -> fx.Node | None:
    """The value that a node changes in place, if it does."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = str(getattr(node.target, "__name__", node.target))
    target = node.kwargs.get("out")
    in_place = name.endswith("_") and not name.endswith("__") and node.target not in vars(operator).values()
    if in_place or node.kwargs.get("inplace") is True:
        target = node.args[0] if node.args else node.kwargs.get("input")
    elif node.target in UPDATES:
        target = node.args[0]
    return target if isinstance(target, fx.Node) else None


def _piece_graph(nodes: Sequence[fx.Node], piece_of: Mapping[fx.Node, int], index: int, last: int) -> fx.Graph:
    """The graph of piece `index`. Its placeholders are arguments of the model, and values of earlier pieces by name."""
    new = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        """`node` in the new graph; its inputs are copied before."""
        if node not in copied:
            if piece_of.get(node, index) < index:
                copied[node] = new.placeholder(node.name)
            elif node.op == "placeholder":
                copied[node] = new.placeholder(str(node.target))
            else:
                copied[node] = new.node_copy(node, copy)
        return copied[node]

    for node in nodes:
        if piece_of.get(node) == index and node.op != "output":
            copy(node)
    if index == last:
        new.output(fx.node.map_arg(nodes[-1].args[0], copy))
    else:  # values for later pieces, some of them from earlier ones
        leaves = [
            n for n in nodes if piece_of.get(n, last) <= index and any(piece_of[user] > index for user in n.users)
        ]
        new.output({node.name: copy(node) for node in leaves})
    return new
