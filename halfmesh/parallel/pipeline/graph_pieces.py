"""A traced forward in pieces: what each of them computes, takes from the ones before, and leaves to those after."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import fx

from ...errors import InputError
from .questions import at

_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "exponential", "cauchy", "geometric")
UPDATES = (
    *(operator.iadd, operator.isub, operator.imul, operator.imatmul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
)
"""They change tensors in place; of numbers they make others."""


def uses_of(graph: fx.Graph) -> tuple[str, ...]:
    """The modules and parameters of a graph."""
    return tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")))


def cut(graph: fx.Graph, points: Sequence[str]) -> list[fx.Graph]:
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
        raise InputError(
            f"parallel.pipeline.partition: {', '.join(missing)} is never called by the model's forward; name modules "
            "that are"
        )
    places = [begins[point] for point in points]
    _refuse_nothing(nodes, dict(zip(points, places, strict=True)))
    if places != sorted(places):
        order = ", ".join(sorted(points, key=lambda point: begins[point]))
        raise InputError(
            f"parallel.pipeline.partition: the forward calls these modules in the order {order}; "
            "name them in that order"
        )
    everywhere = _computed_everywhere(nodes)
    _refuse_changes(nodes, everywhere)
    piece_of: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if node not in everywhere and node.op != "output":
            piece_of[node] = sum(position >= place for place in places)
            changed = _changed_by(node)
            if changed is not None and changed.op == "get_attr" and piece_of[changed] != piece_of[node]:
                raise InputError(
                    f"parallel.pipeline.partition: {changed.target} is changed in place in another stage than it is "
                    f"first used, which has a copy{at(node.meta['place'])}; change it where it is used first, or in a "
                    "module of its own"
                )
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
        if node.op == "call_function" and node.target in UPDATES and isinstance(node.args[0], fx.Node):
            target = node.args[0]
            used_later = any(user in target.users for user in nodes[position + 1 :])
            changed = target if target.op == "placeholder" or used_later else None
        if changed in everywhere:
            raise InputError(
                f"parallel.pipeline.partition: the forward changes {changed} in place{at(node.meta['place'])}, but "
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
