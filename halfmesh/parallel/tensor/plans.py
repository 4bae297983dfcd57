"""Finds the tensor style of each module, from plans or the config's patterns, and checks that it fits the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from torch import nn

from ...errors import HalfmeshError, InputError, find_near, page
from ...utils.torch_private import is_compiled
from ..models.peft import look_through
from ..registries import TENSOR_PLANS
from ..shard_spec import Split
from ..trial import comes_from, is_within
from . import styles
from .layers import ShardedLayer, TensorAxis
from .styles import Style, parse_style


def generalise(name: str) -> str:
    """`name` with "*" for numbers: "blocks.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@dataclass(frozen=True)
class Assignment:
    """A module, its style, and the plan that assigns it.

    Attributes:
        in_region: True if a module around it gathers the sequence.
    """

    name: str
    module: nn.Module = field(repr=False)
    style: Style = field(repr=False)
    text: str
    plan: str
    in_region: bool = False

    def find_problems(self, size: int) -> list[str]:
        """The reasons why the module cannot be sharded over `size` ranks in this way."""
        return [f"{self}: {problem}" for problem in self.style.find_problems(self.module, size)]

    def install(self, axis: TensorAxis) -> None:
        """Make the module work with its shards."""
        for name in self.style.attributes:
            setattr(self.module, name, getattr(self.module, name) // axis.size)
        self.style.install(self.module, axis, self.in_region)
        if isinstance(self.module, ShardedLayer):
            self.module.axis, self.module.in_region = axis, self.in_region

    def __str__(self) -> str:
        return f"{generalise(self.name) or 'the model'} ({self.text}, from plan {self.plan!r})"


def splits_of(assignments: Iterable[Assignment]) -> dict[nn.Parameter, Split]:
    """The parameters that are sharded, and how."""
    return {a.module.get_parameter(n): split for a in assignments for n, split in a.style.splits(a.module).items()}


def elementwise(name: str) -> Callable[[Any], str | None]:
    """Return a `find_problem` that rejects an activation, under this name, that combines features."""
    softmaxes = (nn.Softmax, nn.Softmin, nn.LogSoftmax)
    message = "its activation is a softmax over features, which are sharded; use another activation"
    return lambda layer: message if isinstance(attrgetter(name)(layer), softmaxes) else None


@dataclass(frozen=True)
class LayerPlan:
    """A tensor-parallel plan for one kind of layer, wherever a model contains it.

    Args:
        layers: the classes of the layer, or their full names ("package.module.Class") if they may not be installed. A
            derived class matches if it has the same `forward`.
        styles: the style of each module within the layer. The keys are patterns of module names, relative to the layer
            ("mlp.fc1", "blocks.*"; "" is the layer itself).
        sequence: the styles that sequence parallelism adds, in the same form.
        find_problem: called with each layer. Returns the reason why it cannot be sharded, or None.
    """

    layers: tuple[type[nn.Module] | str, ...]
    styles: Mapping[str, str] = field(default_factory=dict)
    sequence: Mapping[str, str] = field(default_factory=dict)
    find_problem: Callable[[nn.Module], str | None] = lambda layer: None

    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        """Yield the name and the style of each module of `model` that the plan shards. Yields nothing if the model has
        no layer of these classes.

        Args:
            model: the full model.
            sequence_parallel: add the styles of `sequence`.

        Raises:
            InputError: `find_problem` reported a problem of a layer.
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


def _find_styles(
    model: nn.Module, plan: str | Mapping[str, str], sequence_parallel: bool, problems: list[str]
) -> Iterator[tuple[str, str, str]]:
    """A plan's name, a module's name and its style, in the order of the plan. Adds its problems to `problems`."""
    if isinstance(plan, str):
        yield from _find_registered(model, plan, sequence_parallel, problems)
        return
    names = [name for name, _ in model.named_modules()]
    named = {name for pattern, text in plan.items() for name in names if text != "auto" and fnmatchcase(name, pattern)}
    for pattern, text in plan.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            problems.append(f"the pattern {pattern!r} matches no module{near_names(pattern, names)}")
        elif text != "auto":
            yield from ((pattern, name, text) for name in matching)
        else:
            for source, name, style in _find_registered(model, "auto", sequence_parallel, problems):
                # In the modules around these, fast paths are also switched off and numbers of heads checked.
                around = style.startswith(("off", "config_heads"))
                inside = any(is_within(name, top) or (around and is_within(top, name)) for top in matching)
                if inside and name not in named:
                    yield source, name, style


def _find_registered(
    model: nn.Module, plan: str, sequence_parallel: bool, problems: list[str]
) -> Iterator[tuple[str, str, str]]:
    for name, registered in TENSOR_PLANS.each() if plan == "auto" else [(plan, TENSOR_PLANS.get(plan))]:
        try:
            yield from [(name, *style) for style in registered.styles_in(model, sequence_parallel)]
        except InputError as error:
            problems.append(str(error))


def caller(modules: Mapping[str, nn.Module], name: str) -> str:
    """The nearest module above `name` that is called (a ModuleList is not)."""
    while name:
        name = name.rpartition(".")[0]
        if type(modules[name]).forward is not nn.Module.forward:
            break
    return name


def near_names(pattern: str, names: Iterable[str]) -> str:
    """The end of a message about a pattern that matches none of the modules' `names`: the nearest ones, or examples."""
    general = sorted({generalise(known) for known in names if known})
    near = find_near(generalise(pattern), general, cutoff=0.5)
    return f"; did you mean {near!r}?" if near else f"; it has {', '.join(general[:8])}"


def resolve(
    model: nn.Module, size: int, plan: str | Mapping[str, str] = "auto", sequence_parallel: bool = False
) -> tuple[list[Assignment], list[str]]:
    """The assignments of `plan` (a registered name, "auto", or patterns with styles) that shard `model` over `size`
    ranks, and all problems."""
    modules = dict(model.named_modules())
    problems: list[str] = []
    found: dict[tuple[str, str], Assignment] = {}
    for source, name, text in _find_styles(model, plan, sequence_parallel, problems):
        try:
            for own, style in look_through(modules, name, text, sequence_parallel):
                found.setdefault((own, style), Assignment(own, modules[own], parse_style(style), style, source))
        except HalfmeshError as error:
            problems.append(f"plan {source!r}, module {generalise(name)!r}: {error}")
    if any(map(is_compiled, modules.values())):
        problems.append("the model is already compiled, so its layers cannot be sharded; pass it uncompiled")
    assignments = list(found.values())
    problems += [problem for a in assignments for problem in a.find_problems(size)]
    if problems:
        return assignments, list(dict.fromkeys(problems))  # those of repeated blocks once
    if plan == "auto":
        tied = list(_shard_tied_weights(model, assignments))
        problems += [problem for a in tied for problem in a.find_problems(size)]
        assignments += tied
    regions = [a.name for a in assignments if a.style.is_region]
    assignments = [replace(a, in_region=any(is_within(a.name, region) for region in regions)) for a in assignments]
    if not any(a.style.splits(a.module) for a in assignments):
        which = "no plan is registered for any layer of" if plan == "auto" else f"plan {plan!r} shards nothing of"
        problems.append(
            f"{which} {type(model).__name__}; write one (see {page('Tensor parallelism')}). Convolutions cannot be "
            "sharded: if most of the model is convolutions, leave tensor at 1"
        )
    problems += [*_find_conflicts(assignments), *_find_inconsistent_ties(model, assignments)]
    problems += [] if isinstance(plan, str) else _find_heads(model, assignments)
    if sequence_parallel or any(isinstance(a.style, (styles.SequenceBegin, styles.SequenceEnd)) for a in assignments):
        problems += _find_sequence_problems(model, assignments)
    return assignments, list(dict.fromkeys(problems))


def _find_heads(model: nn.Module, assignments: Sequence[Assignment]) -> Iterator[str]:
    """Modules with a sharded projection and a number of heads that no style of the config's patterns has."""
    counted = {a.name for a in assignments if isinstance(a.style, styles.Heads)}
    begin = [a for a in assignments if isinstance(a.style, styles.Colwise) and a.style.opens_fork]
    for parent in sorted({a.name.rpartition(".")[0] for a in begin} - counted):
        numbers = {name: n for name, n in vars(model.get_submodule(parent)).items() if type(n) is int}
        # num_heads, n_kv_heads, nhead, heads; but not head_dim
        found = [n for n in numbers if "head" in n and not any(w in n for w in ("dim", "size", "width", "features"))]
        if found:
            yield (
                f"{generalise(parent)!r} has {found[0]}={numbers[found[0]]}, and its features are sharded; add "
                f"{generalise(parent)!r}: 'heads({', '.join(found)})' if its forward reads that number, or 'heads()' "
                "if it takes the number of heads from the shape (-1)"
            )


def _find_conflicts(assignments: Sequence[Assignment]) -> Iterator[str]:
    """Parameters and attributes that two styles divide."""
    claims: dict[tuple[str, str], Assignment] = {}
    for a in assignments:
        for own in (*a.style.splits(a.module), *a.style.attributes):
            other = claims.setdefault((a.name, own), a)
            if other is not a:
                yield f"{own} is sharded twice, by {other} and {a}; remove one, or name one plan (tensor.plan)"


def _uses(model: nn.Module, assignments: Sequence[Assignment]) -> Collection[dict[tuple[str, str], Split | None]]:
    """For each parameter the names of the modules that have it, with its name there, and how it is split there."""
    splits = {(a.name, own): split for a in assignments for own, split in a.style.splits(a.module).items()}
    uses: defaultdict[nn.Parameter, dict[tuple[str, str], Split | None]] = defaultdict(dict)
    for name, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False, remove_duplicate=False):
            uses[param][name, own] = splits.get((name, own))
    return uses.values()


def _shard_tied_weights(model: nn.Module, assignments: Sequence[Assignment]) -> Iterator[Assignment]:
    """Under `plan="auto"`: an embedding and a head that share a weight are both sharded if one is."""
    for uses in _uses(model, assignments):
        for name, _ in (use for use, split in uses.items() if split is None and Split(0) in uses.values()):
            module = model.get_submodule(name)
            if isinstance(module, (nn.Embedding, nn.Linear)):
                yield Assignment(name, module, styles.Vocab(), "vocab", "auto")


def _find_inconsistent_ties(model: nn.Module, assignments: Sequence[Assignment]) -> Iterator[str]:
    for uses in _uses(model, assignments):
        if len(set(uses.values())) > 1:
            shown = [f"{name}.{own} ({split or 'whole'})" for (name, own), split in uses.items()]
            yield f"{' and '.join(shown)} share one weight; give them one style (such as 'vocab'), or leave all whole"


def _find_sequence_problems(model: nn.Module, assignments: Sequence[Assignment]) -> Iterator[str]:
    """Under sequence parallelism every layer between begin and end must be known."""
    begins = {a.name for a in assignments if isinstance(a.style, styles.SequenceBegin)}
    ends = {a.name for a in assignments if isinstance(a.style, styles.SequenceEnd)}
    if not begins or not ends:
        yield "sequence_parallel=True, but no plan says where the sequence is sharded and gathered; set it to False"
        return
    between, inside = set(), False  # from each begin to the next end, in the order in which the model has its modules
    for name, _ in model.named_modules():
        inside = (inside or name in begins) and name not in ends
        if inside:
            between.add(name)
    regions = [a.name for a in assignments if a.style.is_region]
    gathered = [a.name for a in assignments if isinstance(a.style, styles.ColwiseGather)]
    for a in assignments:
        around = [region for region in regions if is_within(a.name, region)]
        of_features = isinstance(a.style, styles.Rowwise) or a.style.opens_fork
        if a.name in between and (isinstance(a.style, styles.Attention) or (of_features and not a.in_region)):
            yield f"{a}: under sequence_parallel=True it must be in a 'region', as MultiheadAttention cannot be"
        elif isinstance(a.style, styles.RowwiseSplit) and around:
            if not any(is_within(name, region) for name in gathered for region in around):
                yield f"{a}: in a 'region' it would add whole gradients; use 'rowwise' after 'colwise', or none"
        elif a.style.is_region and a.name not in between:
            yield f"{a}: it is not between 'sequence_begin' and 'sequence_end', so its sequence is whole already"
