"""Models that no partitioner knows, cut at modules that the user names: their forward is traced with torch.fx.

Only the modules around the split points are looked into; all others are called as they are. What a stage takes from an
earlier one is found in the graph, residual connections across several stages too. What can be computed from the model's
arguments alone (masks, positions, sizes) is computed by every stage that needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn

from ...errors import InputError, find_near
from .graph_pieces import cut, uses_of
from .pieces import Call, Piece
from .questions import at, form, is_models_own, place_of_error
from .tracing import opened, plain_values, trace

_REGISTER = "register a partitioner for the model (halfmesh.PARTITIONERS, see docs/pipeline.md)"
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
        looks_into = tuple(name for name, _ in opened(model, self.points))
        return [
            Piece(names[i], used, partial(traced.run, i), looks_into if i == 0 else (), traced.prepare)
            for i, used in enumerate(traced.uses)
        ]

    def _refuse_unknown(self, model: nn.Module) -> None:
        known = dict(model.named_modules())
        for point in self.points:
            if point not in known:
                near = find_near(point, filter(None, known), cutoff=0.5)
                hint = f"; did you mean {near!r}?" if near else ""
                raise InputError(f"parallel.pipeline.partition: {point!r} is not a module of the model{hint}")
        if len(set(self.points)) < len(self.points):
            raise InputError(f"parallel.pipeline.partition: a module is named twice in {self.points}; name it once")


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
        plain: numbers, flags and words on them.
        answers: to what it asks about shapes.
    """

    given: frozenset[str]
    fixed: frozenset[tuple[str, Any]]
    training: tuple[bool, ...]
    plain: str
    answers: tuple[bool, ...] = ()


class _TracedModel:
    """The graphs of one model's forward, one row of them for each kind of call.

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
        self._graphs: dict[_Kind, list[fx.Graph]] = {}
        self._answers: dict[_Kind, dict[Any, tuple[bool, ...]]] = {}  # of kinds that ask, by the shapes of a call
        self._interpreters: WeakKeyDictionary[nn.Module, dict[tuple[_Kind, int], fx.Interpreter]]
        self._interpreters = WeakKeyDictionary()
        needed = {n: _GIVEN for n, default in self._defaults.items() if default is inspect.Parameter.empty}
        graph, _ = self._trace(model, self._kind(needed, model), None)
        self.uses = [uses_of(piece) for piece in cut(graph, points)]

    def prepare(self, model: nn.Module, call: Call) -> None:
        """Trace the model for calls like `call`, if that was not done before.

        Raises:
            InputError: it cannot be traced, or it needs modules that other stages hold.
        """
        values = self._values(call)
        kind = self._kind(values, model)
        if kind in self._graphs or form(values) in self._answers.get(kind, {}):
            return
        graph, answers = self._trace(model, kind, values)
        pieces = cut(graph, self._points)
        for piece, first in zip(pieces, self.uses, strict=True):
            new = [name for name in uses_of(piece) if name not in first]
            if new:
                mode = "training" if model.training else "evaluation"
                raise InputError(
                    f"called with {', '.join(sorted(kind.given))} in {mode}, a stage needs {', '.join(new)}, which it "
                    "does not hold: stages are made for calls without optional arguments, in the mode that the model "
                    f"is in at initialize; {_REGISTER}"
                )
        if answers:
            self._answers.setdefault(kind, {})[form(values)] = answers
        self._graphs.setdefault(replace(kind, answers=answers), pieces)

    def run(self, index: int, model: nn.Module, call: Call, carry: Any) -> Any:
        """Piece `index`: `carry` and what is returned are values by name; the last returns the model's output."""
        values = self._values(call)
        kind = self._kind(values, model)
        if kind in self._answers:
            kind = replace(kind, answers=self._answers[kind][form(values)])
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
        plain = plain_values(module for _, module in opened(model, self._points))
        training = (module.training for _, module in opened(model, self._points))
        return _Kind(frozenset(values.keys() - fixed.keys()), frozenset(fixed.items()), tuple(training), plain)

    def _trace(self, model: nn.Module, kind: _Kind, values: dict[str, Any] | None) -> tuple[fx.Graph, tuple[bool, ...]]:
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


def takes_any_arguments(model: nn.Module) -> bool:
    """Whether the model's forward has *args or **kwargs, of which a trace does not know what is in them."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(parameter.kind in kinds for parameter in inspect.signature(model.forward).parameters.values())


def _thawed(value: Any) -> Any:
    """With lists and dicts in place of fx's immutable ones."""
    if isinstance(value, fx.immutable_collections.immutable_list):
        return [_thawed(item) for item in value]
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {key: _thawed(item) for key, item in value.items()}
    return tuple(_thawed(item) for item in value) if type(value) is tuple else value
