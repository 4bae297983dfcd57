"""Which module gets which style: plans for kinds of layers, the config's own patterns, and what both come down to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol

from torch import nn

from ...errors import InputError, RegistryError, find_near
from ..modules import comes_from
from ..registries import TENSOR_PLANS
from .feature_styles import Heads
from .style import Style, parse_style


@dataclass(frozen=True)
class Assignment:
    """A module, the style it gets, and the plan that says so."""

    name: str
    module: nn.Module = field(repr=False)
    style: Style = field(repr=False)
    text: str
    plan: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.text}, from plan {self.plan!r})"


class TensorPlan(Protocol):
    """What is registered in TENSOR_PLANS: it says of the layers that it knows how each is divided."""

    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        """Names of modules of `model`, each with a style ("colwise"). Nothing where it knows no layer.

        Raises:
            InputError: it knows a layer, and that it cannot be divided.
        """
        ...


@dataclass(frozen=True)
class LayerPlan:
    """A plan for one class of layers, wherever in a model they are.

    Args:
        layers: the classes, or their full names ("package.module.Class") for those that may not be installed. A
            derived class counts if it has the same `forward`.
        styles: patterns of names of modules within the layer ("mlp.fc1", "blocks.*"; "" is the layer itself), each
            with its style.
        sequence: what sequence parallelism adds. An empty one means that it works with it, or not at all, as its
            surroundings say.
        find_problem: says why a layer of these classes cannot be divided, if it cannot.
    """

    layers: tuple[type[nn.Module] | str, ...]
    styles: Mapping[str, str] = field(default_factory=dict)
    sequence: Mapping[str, str] = field(default_factory=dict)
    find_problem: Callable[[nn.Module], str | None] = lambda layer: None

    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        """Names of modules of `model`, each with a style; nothing where no layer is of these classes.

        Raises:
            InputError: `find_problem` says that one cannot be divided.
        """
        styles = [*self.styles.items(), *(self.sequence.items() if sequence_parallel else ())]
        for prefix, layer in model.named_modules():
            if not comes_from(layer, self.layers):
                continue
            if (problem := self.find_problem(layer)) is not None:
                raise InputError(f"{prefix or 'the model'} ({type(layer).__name__}): {problem}")
            names = [name for name, _ in layer.named_modules()]
            for pattern, style in styles:
                for name in names:
                    if fnmatchcase(name, pattern):
                        yield ".".join(part for part in (prefix, name) if part), style


def assign(
    model: nn.Module, plan: str | Mapping[str, str], sequence_parallel: bool
) -> tuple[list[Assignment], list[str]]:
    """What `plan` (a name, "auto", or patterns with styles) says of modules of `model`, and what is wrong with it."""
    found = _Assignments(model)
    if isinstance(plan, str):
        found.add_registered(None if plan == "auto" else plan, sequence_parallel)
    else:
        for pattern, text in plan.items():
            names = found.matching(pattern)
            if names and text == "auto":
                found.add_registered(None, sequence_parallel, within=names)
            else:
                found.add([(name, text) for name in names], pattern)
    return found.assignments, found.problems


class _Assignments:
    """Assignments as they come together, with what is wrong."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self.assignments: list[Assignment] = []
        self.problems: list[str] = []

    def add_registered(self, name: str | None, sequence_parallel: bool, within: list[str] | None = None) -> None:
        """Take the styles of the registered plan `name`, or of all.

        Args:
            within: only those of modules at or below these, and what is switched off above them.
        """
        try:
            plans = TENSOR_PLANS.each() if name is None else [(name, TENSOR_PLANS.get(name))]
        except RegistryError as error:
            self.problems.append(str(error))
            return
        for plan, registered in plans:
            try:
                styles = list(registered.styles_in(self._model, sequence_parallel))
            except InputError as error:
                self.problems.append(str(error))
                continue
            if within is not None:
                styles = [style for style in styles if any(_concerns(style[0], style[1], top) for top in within)]
            self.add(styles, plan)

    def add(self, styles: list[tuple[str, str]], plan: str) -> None:
        for name, text in styles:
            module = self._modules.get(name)
            if module is None:
                self.problems.append(f"plan {plan!r} names {name!r}, which the model has not{self._near(name)}")
                continue
            try:
                new = Assignment(name, module, parse_style(text), text, plan)
            except InputError as error:
                self.problems.append(f"plan {plan!r}, module {name!r}: {error}")
                continue
            self._add(new)

    def _add(self, new: Assignment) -> None:
        for old in self.assignments:
            if old.name == new.name and old.text == new.text:
                return
            if old.name == new.name and (both := _divides(old) & _divides(new)):
                registered = old.plan in TENSOR_PLANS and new.plan in TENSOR_PLANS
                advice = f"choose one (parallel.tensor.plan={new.plan!r})" if registered else "leave one of them out"
                self.problems.append(
                    f"{new.name!r} has its {' and '.join(sorted(both))} divided twice: {old.text} by plan "
                    f"{old.plan!r}, {new.text} by plan {new.plan!r}; {advice}"
                )
                return
        self.assignments.append(new)

    def matching(self, pattern: str) -> list[str]:
        """The names of modules that `pattern` matches; none is a problem."""
        names = [name for name in self._modules if fnmatchcase(name, pattern)]
        if not names:
            self.problems.append(f"the pattern {pattern!r} matches no module{self._near(pattern)}")
        return names

    def _near(self, name: str) -> str:
        return near_names(name, self._modules)


def _divides(assignment: Assignment) -> set[str]:
    """The parameters and numbers of the module that become this rank's part."""
    style, module = assignment.style, assignment.module
    if isinstance(style, Heads):
        return set(style.attributes)
    return set() if list(style.find_problems(module, 1)) else set(style.splits(module))


def caller(modules: Mapping[str, nn.Module], name: str) -> str:
    """The nearest module above `name` that is called itself (a ModuleList is not)."""
    while name:
        name = name.rpartition(".")[0]
        if type(modules[name]).forward is not nn.Module.forward:
            break
    return name


def generalise(name: str) -> str:
    """`name` with numbers as "*": "blocks.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def near_names(pattern: str, names: Iterable[str]) -> str:
    """What to say of a pattern that matches none of the modules' `names`: the nearest, or what there is."""
    general = sorted({generalise(known) for known in names if known})
    near = find_near(generalise(pattern), general, cutoff=0.5)
    return f"; did you mean {near!r}?" if near else f"; it has {', '.join(general[:8])}"


def _concerns(name: str, text: str, top: str) -> bool:
    """Whether a style (`text`, of the module `name`) is needed where only `top` is divided."""
    return is_within(name, top) or (text.startswith("off") and is_within(top, name))


def is_within(name: str, top: str) -> bool:
    """Whether the module `name` is `top`, or one of those in it."""
    return not top or name == top or name.startswith(f"{top}.")
