"""Models that no partitioner knows, cut at modules that the user names: their forward is traced with torch.fx.

Only the modules around the split points are looked into; all others are called as they are. What a stage takes from an
earlier one is found in the graph, residual connections across several stages too. What can be computed from the model's
arguments alone (masks, positions, sizes) is computed by every stage that needs it.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ...errors import InputError, find_near
from .pieces import Call, Piece

_REGISTER = "register a partitioner for the model (halfmesh.PARTITIONERS, see docs/pipeline.md)"
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "exponential", "cauchy", "geometric")
_MAKERS = {
    *(torch.tensor, torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tril_indices, torch.triu_indices),
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.randperm),
}
_UPDATES = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and hasattr(operator, name[1:])}
"""iadd and the like, which change tensors in place and make other numbers."""
_GIVEN = object()
"""The value of an argument, when its value is not known yet."""


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

    proxy_buffer_attributes = True  # else what is computed from a buffer would be kept as it was at the trace

    def __init__(self, points: Sequence[str]) -> None:
        super().__init__(param_shapes_constant=True)
        self._points = points
        self._modes = _modes()

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not _holds_a_point(name, self._points)

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Proxy:
        if _modes() != self._modes:
            name = getattr(target, "__name__", target)
            raise InputError(f"{name} is called within no_grad, autocast or the like, which a trace does not keep")
        return super().create_proxy(kind, target, *args, **kwargs)


class _Makers(TorchFunctionMode):
    """Records what makes tensors of no other, as torch.rand: else one tensor would be kept for all calls."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAKERS and hasattr(self._tracer, "graph"):
            return self._tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Interpreter(fx.Interpreter):
    """Gives modules, and the caller, lists and dicts that can be changed, as the forward does."""

    extra_traceback = False

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        return _thawed(super().map_nodes_to_values(args, n))


@dataclass(frozen=True)
class _Kind:
    """What a forward may ask for in an `if`: calls that differ in it are traced each by itself.

    Attributes:
        given: the arguments that have values; one that is left out has its default.
        fixed: None, flags and words, with their names.
        training: whether the modules that are looked into train.
    """

    given: frozenset[str]
    fixed: frozenset[tuple[str, Any]]
    training: tuple[bool, ...]


class _TracedModel:
    """The graphs of one model's forward, one row of them for each kind of call.

    Attributes:
        uses: the modules and parameters of each piece, which calls without optional arguments decide.
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
        needed = {n: _GIVEN for n, default in self._defaults.items() if default is inspect.Parameter.empty}
        self.uses = [_uses(graph) for graph in self._trace(model, self._kind(needed, model))]

    def prepare(self, model: nn.Module, call: Call) -> None:
        """Trace the model for calls like `call`, if that was not done before.

        Raises:
            InputError: it cannot be traced, or it needs modules that other stages hold.
        """
        kind = self._kind(self._values(call), model)
        if kind in self._graphs:
            return
        graphs = self._trace(model, kind)
        for graph, first in zip(graphs, self.uses, strict=True):
            new = [name for name in _uses(graph) if name not in first]
            if new:
                mode = "training" if model.training else "evaluation"
                raise InputError(
                    f"called with {', '.join(sorted(kind.given))} in {mode}, a stage needs {', '.join(new)}, which it "
                    "does not hold: stages are made for calls without optional arguments, in the mode that the model "
                    f"is in at initialize; {_REGISTER}"
                )
        self._graphs[kind] = graphs

    def run(self, index: int, model: nn.Module, call: Call, carry: Any) -> Any:
        """Piece `index`: `carry` and what is returned are values by name; the last returns the model's output."""
        values = self._values(call)
        kind = self._kind(values, model)
        graph = self._graphs[kind][index]
        known = self._interpreters.setdefault(model, {})
        if (kind, index) not in known:
            known[kind, index] = _Interpreter(model, graph=graph)
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
        fixed = {name: value for name, value in values.items() if isinstance(value, (bool, str, NoneType))}
        training = (module.training for name, module in model.named_modules() if _holds_a_point(name, self._points))
        return _Kind(frozenset(values.keys() - fixed.keys()), frozenset(fixed.items()), tuple(training))

    def _trace(self, model: nn.Module, kind: _Kind) -> list[fx.Graph]:
        defaults = {name: default for name, default in self._defaults.items() if name not in kind.given}
        tracer = _Tracer(self._points)
        modules = [module for name, module in model.named_modules() if _holds_a_point(name, self._points)]
        try:
            with unchanged(modules), warnings.catch_warnings(), _Makers(tracer):
                warnings.filterwarnings("ignore", "Was not able to add assertion", UserWarning)
                graph = tracer.trace(model, concrete_args=defaults | dict(kind.fixed) or None)
                _refuse_kept(modules)
                _fix_constants(graph, model)
        except Exception as error:  # whatever the forward does with what has no value yet
            raise InputError(
                f"{self._class}.forward cannot be traced for split points: {error}. Move what asks for values (if, "
                f"loops over sizes), keeps them, or works with no_grad or autocast into a module of its own, or "
                f"{_REGISTER}"
            ) from error
        for node in list(graph.nodes):  # what fx leaves of fixed arguments
            if node.op == "placeholder" and _argument(node) not in kind.given:
                for user in [user for user in node.users if "assert" in str(user.target)]:
                    graph.erase_node(user)
                if not node.users:
                    graph.erase_node(node)
        return _cut(graph, self._points)


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What a forward sets on `modules`, or takes away, is put back."""
    before = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for now, then in before:
            now.clear()
            now.update(then)


def _holds_a_point(name: str, points: Sequence[str]) -> bool:
    """Whether it is the model ("") or the name of a module that has one of `points` within."""
    return not name or any(point.startswith(f"{name}.") for point in points)


def _modes() -> tuple[bool, ...]:
    """What with-statements around a call may change."""
    devices = ("cpu", "cuda")
    autocast = (bool(torch.is_autocast_enabled(device)) for device in devices)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _refuse_kept(modules: Iterable[nn.Module]) -> None:
    kept = [name for module in modules for name, value in vars(module).items() if isinstance(value, fx.Proxy)]
    if kept:
        raise InputError(f"it keeps values on the model ({', '.join(kept)})")


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


def _thawed(value: Any) -> Any:
    """With lists and dicts in place of fx's immutable ones."""
    if isinstance(value, fx.immutable_collections.immutable_list):
        return [_thawed(item) for item in value]
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {key: _thawed(item) for key, item in value.items()}
    return tuple(_thawed(item) for item in value) if type(value) is tuple else value


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
    _refuse_nothing(nodes, dict(zip(points, places, strict=True)))
    if places != sorted(places):
        order = ", ".join(sorted(points, key=lambda point: begins[point]))
        raise InputError(f"parallel.pipeline.partition: the forward calls these modules in the order {order}")
    everywhere = _computed_everywhere(nodes)
    _refuse_changes(nodes, everywhere)
    piece_of: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if node not in everywhere and node.op != "output":
            piece_of[node] = sum(position >= place for place in places)
    return [_piece_graph(nodes, piece_of, everywhere, index, len(points) + 1) for index in range(len(points) + 1)]


def _refuse_nothing(nodes: Sequence[fx.Node], begins: dict[str, int]) -> None:
    """Raise InputError where a stage would have no module."""
    first = min(begins, key=lambda point: begins[point])
    if not any(node.op in ("call_module", "get_attr") for node in nodes[: begins[first]]):
        raise InputError(
            f"parallel.pipeline.partition: the forward begins with {first}, which leaves nothing to the first stage; "
            "name the modules with which the other stages begin"
        )
    for point, place in begins.items():
        same = [other for other, where in begins.items() if where == place and other != point]
        if same:
            raise InputError(
                f"parallel.pipeline.partition: {point} and {same[0]} begin at the same place; name one of them"
            )


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
        if node.op == "call_function" and node.target in _UPDATES and isinstance(node.args[0], fx.Node):
            target = node.args[0]
            used_later = any(user in target.users for user in nodes[position + 1 :])
            changed = target if target.op == "placeholder" or used_later else None
        if changed in everywhere:
            raise InputError(
                f"parallel.pipeline.partition: the forward changes {changed} in place ({node.name}), which follows from "
                "its arguments alone and is computed by every stage that needs it; use the form that returns a new "
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
