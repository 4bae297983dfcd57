"""The style of each module: plans for classes of layers, the config's patterns, and the assignments from both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...errors import HalfmeshError, InputError, find_near
from ..modules import comes_from
from ..registries import TENSOR_PLANS
from ..shard_spec import Split
from .layers import ShardedLayer, TensorAxis
from .sequence_styles import Style, parse_style


@dataclass(frozen=True)
class Assignment:
    """A module, its style, and the plan that assigns it.

    Attributes:
        in_region: it is in a module that gathers the sequence.
    """

    name: str
    module: nn.Module = field(repr=False)
    style: Style = field(repr=False)
    text: str
    plan: str
    in_region: bool = False

    def splits(self) -> dict[str, Split]:
        """The direct parameters of the module that are sharded, by name; none if the style does not fit the module."""
        fits = not any(self.style.find_problems(self.module, 1))
        return self.style.splits(self.module) if fits else {}

    def install(self, axis: TensorAxis) -> Iterable[Any]:
        """Make the module work with its shards; returns hooks."""
        for name in self.style.attributes:
            setattr(self.module, name, getattr(self.module, name) // axis.size)
        hooks = list(self.style.install(self.module, axis, self.in_region))
        if isinstance(self.module, ShardedLayer):
            self.module.plan_entry = str(self)
        return hooks

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.text}, from plan {self.plan!r})"


@dataclass(frozen=True)
class LayerPlan:
    """A plan for one class of layers, wherever they are in a model.

    Args:
        layers: the classes, or their full names ("package.module.Class") for those that may not be installed. A
            derived class counts if it has the same `forward`.
        styles: patterns of names of modules within the layer ("mlp.fc1", "blocks.*"; "" is the layer itself), each
            with its style.
        sequence: the styles that sequence parallelism adds.
        find_problem: returns the reason why a layer of these classes cannot be sharded, or None.
    """

    layers: tuple[type[nn.Module] | str, ...]
    styles: Mapping[str, str] = field(default_factory=dict)
    sequence: Mapping[str, str] = field(default_factory=dict)
    find_problem: Callable[[nn.Module], str | None] = lambda layer: None

    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        """Names of modules of `model`, each with a style; nothing where no layer is of these classes.

        Raises:
            InputError: `find_problem` reports a layer.
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
    """The assignments of `plan` (a registered name, "auto", or patterns with styles), and its problems."""
    modules = dict(model.named_modules())
    assignments: list[Assignment] = []
    problems: list[str] = []
    for source, name, text in _find_styles(model, plan, sequence_parallel, problems):
        try:
            new = Assignment(name, modules[name], parse_style(text), text, source)
        except HalfmeshError as error:
            problems.append(f"plan {source!r}, module {name!r}: {error}")
            continue
        others = [old for old in assignments if old.name == name]
        if any(old.text == text for old in others):
            continue
        problem = next((problem for old in others if (problem := _find_conflict(old, new)) is not None), None)
        if problem is None:
            assignments.append(new)
        else:
            problems.append(problem)
    return assignments, problems


def _find_styles(
    model: nn.Module, plan: str | Mapping[str, str], sequence_parallel: bool, problems: list[str]
) -> Iterator[tuple[str, str, str]]:
    """A plan's name, a module's name and its style, in the order of the plan. Adds its problems to `problems`."""
    if isinstance(plan, str):
        yield from _find_registered(model, plan, sequence_parallel, problems)
        return
    names = [name for name, _ in model.named_modules()]
    for pattern, text in plan.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            problems.append(f"the pattern {pattern!r} matches no module{near_names(pattern, names)}")
        elif text != "auto":
            yield from ((pattern, name, text) for name in matching)
        else:
            for source, name, style in _find_registered(model, "auto", sequence_parallel, problems):
                # Fast paths are switched off in modules around these, too.
                if any(is_within(name, top) or (style.startswith("off") and is_within(top, name)) for top in matching):
                    yield source, name, style


def _find_registered(
    model: nn.Module, plan: str, sequence_parallel: bool, problems: list[str]
) -> Iterator[tuple[str, str, str]]:
    for name, registered in TENSOR_PLANS.each() if plan == "auto" else [(plan, TENSOR_PLANS.get(plan))]:
        try:
            yield from [(name, *style) for style in registered.styles_in(model, sequence_parallel)]
        except InputError as error:
            problems.append(str(error))


def _find_conflict(old: Assignment, new: Assignment) -> str | None:
    """The conflict of two assignments that shard the same parameters or numbers of one module, if they do."""
    both = {*old.splits(), *old.style.attributes} & {*new.splits(), *new.style.attributes}
    if not both:
        return None
    return (
        f"{new.name!r} has its {' and '.join(sorted(both))} sharded twice: {old.text} by plan {old.plan!r}, {new.text} "
        f"by plan {new.plan!r}; leave out one of the two, or name one registered plan (parallel.tensor.plan = 'name')"
    )


def caller(modules: Mapping[str, nn.Module], name: str) -> str:
    """The nearest module above `name` that is called (a ModuleList is not)."""
    while name:
        name = name.rpartition(".")[0]
        if type(modules[name]).forward is not nn.Module.forward:
            break
    return name


def generalise(name: str) -> str:
    """`name` with "*" for numbers: "blocks.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def near_names(pattern: str, names: Iterable[str]) -> str:
    """The end of a message about a pattern that matches none of the modules' `names`: the nearest ones, or examples."""
    general = sorted({generalise(known) for known in names if known})
    near = find_near(generalise(pattern), general, cutoff=0.5)
    return f"; did you mean {near!r}?" if near else f"; it has {', '.join(general[:8])}"


def is_within(name: str, top: str) -> bool:
    """Return True if the module `name` is `top`, or in it."""
    return not top or name == top or name.startswith(f"{top}.")
