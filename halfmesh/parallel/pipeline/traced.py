"""Models that no partitioner knows, cut at modules that the user names: their forward is traced with torch.fx.

Only the modules around the split points are looked into; all others are called as they are. What a stage takes from an
earlier one is found in the graph, residual connections across several stages too. What can be computed from the model's
arguments alone (masks, positions, sizes) is computed by every stage that needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn

from ...errors import InputError, find_near
from .pieces import Call, Piece

_REGISTER = "register a partitioner for the model (halfmesh.PARTITIONERS, see docs/pipeline.md)"
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "exponential", "cauchy", "geometric")


class TracedPartition:
    """A partitioner that cuts before each of the modules `points`, in the order of the forward."""

    def __init__(self, points: Sequence[str]) -> None:
        self.points = tuple(points)

    def pieces_of(self, model: nn.Module) -> Sequence[Piece]:
        """The pieces between the points.

        Raises:
            InputError: a point is no module, is not called, or not in this order; or the forward cannot be traced.
        """
        self._refuse_unknown(model)
        traced = _TracedModel(model, self.points)
        names = ("the beginning", *self.points)
        return [Piece(names[i], used, partial(traced.run, i), traced.prepare) for i, used in enumerate(traced.uses)]

    def _refuse_unknown(self, model: nn.Module) -> None:
        known = dict(model.named_modules())
        for point in self.points:
            if point not in known:
                near = find_near(point, filter(None, known), cutoff=0.5)
                hint = f"; did you mean {near!r}?" if near else ""
                raise InputError(f"parallel.pipeline.partition: {point!r} is not a module of the model{hint}")
        if len(set(self.points)) < len(self.points):
            raise InputError(f"parallel.pipeline.partition: a module is named twice in {self.points}")


class _Tracer(fx.Tracer):
    """Looks into the modules that hold a split point, and into no other."""

    def __init__(self, points: Sequence[str]) -> None:
        super().__init__()
        self._points = points

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not any(point.startswith(f"{name}.") for point in self._points)


_Kind = tuple[frozenset[str], bool]
"""Which arguments a call has (one that is left out has its default, and the forward may ask `if mask is not None`), and
whether the model trains."""


class _TracedModel:
    """The graphs of one model's forward, one row of them for each kind of call.

    Attributes:
        uses: the modules and parameters of each piece, which the call without optional arguments decides.
    """

    def __init__(self, model: nn.Module, points: Sequence[str]) -> None:
        self._class = type(model).__name__
        self._points = points
        self._signature = inspect.signature(model.forward)
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if any(parameter.kind in kinds for parameter in self._signature.parameters.values()):
            raise InputError(
                f"{self._class}.forward takes *args or **kwargs, which cannot be traced for split points; {_REGISTER}"
            )
        self._defaults = {n: p.default for n, p in self._signature.parameters.items()}
        self._graphs: dict[_Kind, list[fx.Graph]] = {}
        self._interpreters: WeakKeyDictionary[nn.Module, dict[tuple[_Kind, int], fx.Interpreter]]
        self._interpreters = WeakKeyDictionary()
        needed = frozenset(n for n, default in self._defaults.items() if default is inspect.Parameter.empty)
        self.uses = [_uses(graph) for graph in self._trace(model, needed)]

    def prepare(self, model: nn.Module, call: Call) -> None:
        """Trace the model for calls like `call`, if that was not done before.

        Raises:
            InputError: it cannot be traced, or it needs modules that other stages hold.
        """
        kind = self._kind(self._values(call), model)
        if kind in self._graphs:
            return
        graphs = self._trace(model, kind[0])
        for graph, first in zip(graphs, self.uses, strict=True):
            new = [name for name in _uses(graph) if name not in first]
            if new:
                raise InputError(
                    f"called with {', '.join(sorted(kind[0]))}, a stage needs {', '.join(new)}, which it does not "
                    f"hold: stages are made for calls without optional arguments; {_REGISTER}"
                )
        self._graphs[kind] = graphs

    def run(self, index: int, model: nn.Module, call: Call, carry: Any) -> Any:
        """Piece `index`: `carry` and what is returned are values by name; the last returns the model's output."""
        values = self._values(call)
        kind = self._kind(values, model)
        graph = self._graphs[kind][index]
        known = self._interpreters.setdefault(model, {})
        if (kind, index) not in known:
            known[kind, index] = fx.Interpreter(model, graph=graph)
        values = values | (carry or {})
        inputs = [values[str(node.target)] for node in graph.nodes if node.op == "placeholder"]
        return known[kind, index].run(*inputs, enable_io_processing=False)

    def _values(self, call: Call) -> dict[str, Any]:
        try:
            bound = self._signature.bind(*call.args, **call.kwargs)
        except TypeError as error:
            raise InputError(f"{self._class}.forward: {error}") from error
        return {name: value for name, value in bound.arguments.items() if value is not self._defaults[name]}

    def _kind(self, values: dict[str, Any], model: nn.Module) -> _Kind:
        return frozenset(values), model.training

    def _trace(self, model: nn.Module, given: frozenset[str]) -> list[fx.Graph]:
        fixed = {name: default for name, default in self._defaults.items() if name not in given}
        try:
            graph = _Tracer(self._points).trace(model, concrete_args=fixed or None)
        except Exception as error:  # whatever the forward does with what has no value yet
            raise InputError(
                f"{self._class}.forward cannot be traced for split points: {error}. Move what asks for values (if, "
                f"loops over sizes) into a module of its own, or {_REGISTER}"
            ) from error
        for node in list(graph.nodes):  # what fx leaves of fixed arguments
            if node.op == "placeholder" and _argument(node) not in given:
                for user in [user for user in node.users if "assert" in str(user.target)]:
                    graph.erase_node(user)
                if not node.users:
                    graph.erase_node(node)
        return _cut(graph, self._points)


def _uses(graph: fx.Graph) -> tuple[str, ...]:
    """The modules and parameters of a graph."""
    return tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")))


def _argument(node: fx.Node) -> str:
    """The forward's argument that a placeholder stands for."""
    return str(node.target).lstrip("*")


def _cut(graph: fx.Graph, points: Sequence[str]) -> list[fx.Graph]:
    """The graph in pieces: each from one split point to the next."""
    begins: dict[str, int] = {}
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        if node.op == "call_module":
            for point in points:
                if str(node.target) == point or str(node.target).startswith(f"{point}."):
                    begins.setdefault(point, position)
    missing = [point for point in points if point not in begins]
    if missing:
        raise InputError(f"parallel.pipeline.partition: {', '.join(missing)} is never called by the model's forward")
    places = [begins[point] for point in points]
    if places != sorted(places):
        order = ", ".join(sorted(points, key=lambda point: begins[point]))
        raise InputError(f"parallel.pipeline.partition: the forward calls these modules in the order {order}")
    everywhere = _computed_everywhere(nodes)
    piece_of: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if node not in everywhere and node.op != "output":
            piece_of[node] = sum(position >= place for place in places)
    return [_piece_graph(nodes, piece_of, everywhere, index, len(points) + 1) for index in range(len(points) + 1)]


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
            copied[node] = new.placeholder(_argument(node))
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
