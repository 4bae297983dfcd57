"""Models that no partitioner knows, cut at modules that the user names: their forward is traced with torch.fx.

Only the modules around the split points are looked into; all others are called as they are. What a stage takes from an
earlier one is found in the graph, residual connections across several stages too. What can be computed from the model's
arguments alone (masks, positions, sizes) is computed by every stage that needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import fx, nn

from ...errors import InputError, find_near
from .fx_trace import UPDATES, at, is_models_own, opened, place_of_error, plain_values, trace
from .pieces import Call, Piece

_KEY = "parallel.pipeline.partition"
_REGISTER = "register a partitioner for the model (halfmesh.PARTITIONERS, see docs/pipeline.md)"
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "exponential", "cauchy", "geometric")


def split_at(model: nn.Module, points: Sequence[str]) -> list[Piece]:
    """The pieces of `model` between the modules `points`, in the order of its forward.

    Raises:
        InputError: a point is no module, is not called, or not in this order; or the forward cannot be traced.
    """
    known = dict(model.named_modules())
    for point in points:
        if point not in known:
            near = find_near(point, filter(None, known), cutoff=0.5)
            hint = f"; did you mean {near!r}?" if near else ""
            raise InputError(f"{_KEY}: {point!r} is not a module of the model{hint}")
    forward = _SplitForward(model, points)
    looks_into = tuple(name for name, _ in opened(model, points))
    pieces = [
        Piece(name, uses, partial(forward.run, index), looks_into if index == 0 else (), forward.prepare)
        for index, (name, uses) in enumerate(zip(("the beginning", *points), forward.uses, strict=True))
    ]
    if empty := [piece.name for piece in pieces if not piece.uses]:
        raise InputError(f"{_KEY}: no module is left for the stage of {empty[0]}; name other split points")
    return pieces


def takes_any_arguments(model: nn.Module) -> bool:
    """Whether the model's forward has *args or **kwargs, of which a trace does not know what is in them."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(parameter.kind in kinds for parameter in inspect.signature(model.forward).parameters.values())


@dataclass(frozen=True)
class _Kind:
    """What a forward may ask for in an `if`: calls that differ in it are traced each by itself.

    Attributes:
        given: the arguments that have values; one that is left out has its default.
        fixed: None, flags and strings, with their names.
        plain: numbers, flags and strings on the modules that are looked into, such as whether they train.
        shapes: of the arguments.
    """

    given: frozenset[str]
    fixed: frozenset[tuple[str, Any]]
    plain: str
    shapes: Any


class _SplitForward:
    """The functions that make up one model's forward, one row of them for each kind of call.

    Attributes:
        uses: the modules and parameters of each piece, which calls without optional arguments decide.
    """

    def __init__(self, model: nn.Module, points: Sequence[str]) -> None:
        self._class = type(model).__name__
        self._points = points
        self._signature = inspect.signature(model.forward)
        if takes_any_arguments(model):
            raise InputError(
                f"{self._class}.forward takes *args or **kwargs, which cannot be traced for split points; {_REGISTER}"
            )
        self._defaults = {n: p.default for n, p in self._signature.parameters.items()}
        self._functions: dict[_Kind, list[Callable[[nn.Module, Mapping[str, Any]], Any]]] = {}
        needed = {n: ... for n, default in self._defaults.items() if default is inspect.Parameter.empty}
        self.uses = [_uses_of(piece) for piece in _cut(self._trace(model, self._kind(needed, model), None), points)]

    def prepare(self, model: nn.Module, call: Call) -> None:
        """Trace the model for calls like `call`, if that was not done before.

        Raises:
            InputError: it cannot be traced, or it needs modules that other stages hold.
        """
        values = self._values(call)
        kind = self._kind(values, model)
        if kind in self._functions:
            return
        pieces = _cut(self._trace(model, kind, values), self._points)
        for piece, first in zip(pieces, self.uses, strict=True):
            new = [name for name in _uses_of(piece) if name not in first]
            if new:
                mode = "training" if model.training else "evaluation"
                raise InputError(
                    f"called with {', '.join(sorted(kind.given))} in {mode}, a stage needs {', '.join(new)}, which it "
                    "does not hold: stages are made for calls without optional arguments, in the mode that the model "
                    f"is in at initialize; {_REGISTER}"
                )
        self._functions[kind] = list(map(_compile, pieces))

    def run(self, index: int, model: nn.Module, call: Call, activations: Any) -> Any:
        """Piece `index`: `activations` and what is returned are values by name; the last returns the model's output."""
        values = self._values(call)
        return self._functions[self._kind(values, model)][index](model, values | (activations or {}))

    def _values(self, call: Call) -> dict[str, Any]:
        try:
            bound = self._signature.bind(*call.args, **call.kwargs)
        except TypeError as error:
            raise InputError(f"{self._class}.forward: {error}") from error
        return {name: value for name, value in bound.arguments.items() if value is not self._defaults[name]}

    def _kind(self, values: dict[str, Any], model: nn.Module) -> _Kind:
        fixed = {name: value for name, value in values.items() if isinstance(value, (bool, str, NoneType))}
        plain = plain_values(module for _, module in opened(model, self._points))
        return _Kind(frozenset(values.keys() - fixed.keys()), frozenset(fixed.items()), plain, _shapes_of(values))

    def _trace(self, model: nn.Module, kind: _Kind, values: dict[str, Any] | None) -> fx.Graph:
        left_out = {name: default for name, default in self._defaults.items() if name not in kind.given}
        try:
            return trace(model, self._points, left_out | dict(kind.fixed), values)
        except Exception as error:  # whatever the forward does with what has no value yet
            if values is not None and is_models_own(error):
                raise
            what = f"{error}{at(place_of_error(error))}"
            raise InputError(
                f"{self._class}.forward cannot be traced for split points: {what}. Move what asks for values (if, "
                "loops over sizes), keeps them, or works with no_grad or autocast into a module of its own, or "
                f"{_REGISTER}"
            ) from error


def _shapes_of(value: Any) -> Any:
    """The shapes of the tensors in `value`, and the lengths of its containers."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, _shapes_of(item)) for key, item in value.items())
    return tuple(map(_shapes_of, value)) if isinstance(value, (list, tuple)) else None


def _compile(graph: fx.Graph) -> Callable[[nn.Module, Mapping[str, Any]], Any]:
    """The graph as a function of the model, whose modules and weights it takes from there, and of values by name."""
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
            if str(node.target) == point or str(node.target).startswith(f"{point}."):
                begins.setdefault(point, position)
    missing = [point for point in points if point not in begins]
    if missing:
        raise InputError(f"{_KEY}: {', '.join(missing)} is never called by the model's forward; name modules that are")
    places = [begins[point] for point in points]
    if places != sorted(places):
        order = ", ".join(sorted(points, key=lambda point: begins[point]))
        raise InputError(f"{_KEY}: the forward calls these modules in the order {order}; name them in that order")
    everywhere = _computed_everywhere(nodes)
    _refuse_changes(nodes, everywhere)
    piece_of: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if node not in everywhere and node.op != "output":
            piece_of[node] = sum(position >= place for place in places)
            changed = _changed_by(node)
            if changed is not None and changed.op == "get_attr" and piece_of[changed] != piece_of[node]:
                raise InputError(
                    f"{_KEY}: {changed.target} is changed in place in another stage than it is first used, which has a "
                    f"copy{at(node.meta['place'])}; change it where it is used first, or in a module of its own"
                )
    return [_piece_graph(nodes, piece_of, everywhere, index, len(points) + 1) for index in range(len(points) + 1)]


def _changed_by(node: fx.Node) -> fx.Node | None:
    """What a node changes in place, if it does."""
    target = node.kwargs.get("out")
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    if node.op in ("call_function", "call_method") and (in_place or node.kwargs.get("inplace") is True):
        target = node.args[0] if node.args else node.kwargs.get("input")
    return target if isinstance(target, fx.Node) else None


def _refuse_changes(nodes: Sequence[fx.Node], everywhere: set[fx.Node]) -> None:
    """Raise InputError for changes in place of what each stage computes for itself: some would make them, some not."""
    for position, node in enumerate(nodes):
        changed = _changed_by(node)
        if node.op == "call_function" and node.target in UPDATES and isinstance(node.args[0], fx.Node):
            target = node.args[0]
            used_later = any(user in target.users for user in nodes[position + 1 :])
            changed = target if target.op == "placeholder" or used_later else None
        if changed in everywhere:
            raise InputError(
                f"{_KEY}: the forward changes {changed} in place{at(node.meta['place'])}, but "
                "every stage that needs it computes it for itself, from the arguments; use the form that returns a new "
                "tensor"
            )


def _computed_everywhere(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What follows from the model's arguments alone, without weights or random numbers."""
    found: set[fx.Node] = set()
    for node in nodes:
        plain = node.op == "placeholder" or (
            node.op in ("call_function", "call_method")
            and not any(word in str(getattr(node.target, "__name__", node.target)) for word in _RANDOM)
            and all(parent in found for parent in node.all_input_nodes)
        )
        if plain:
            found.add(node)
    return found


def _piece_graph(
    nodes: Sequence[fx.Node], piece_of: dict[fx.Node, int], everywhere: set[fx.Node], index: int, count: int
) -> fx.Graph:
    """Piece `index` by itself. Its placeholders are arguments of the model, and values of earlier pieces by name."""
    output = next(node for node in nodes if node.op == "output")
    mine = {node for node, piece in piece_of.items() if piece == index}
    later = {node for node, piece in piece_of.items() if piece > index}
    is_last = index == count - 1
    needed_later = _inputs([*later, output], everywhere)
    leaves = [node for node in nodes if piece_of.get(node, count) <= index and node in needed_later]
    wanted = _inputs([*mine, *([output] if is_last else [])], everywhere)
    enters = [node for node in nodes if piece_of.get(node, count) < index and node in wanted | set(leaves)]
    new = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {node: new.placeholder(node.name) for node in enters}
    for node in nodes:
        if node.op == "placeholder" and node in wanted:
            copied[node] = new.placeholder(str(node.target))
    for node in nodes:
        if node in mine or (node in everywhere and node in wanted and node.op != "placeholder"):
            copied[node] = new.node_copy(node, lambda old: copied[old])
    if is_last:
        new.output(fx.node.map_arg(output.args[0], lambda old: copied[old]))
    else:
        new.output({node.name: copied[node] for node in leaves})
    return new


def _inputs(nodes: Iterable[fx.Node], everywhere: set[fx.Node]) -> set[fx.Node]:
    """What `nodes` take directly, or through what is computed everywhere."""
    found: set[fx.Node] = set()
    todo = [parent for node in nodes for parent in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes if node in everywhere else []
    return found
