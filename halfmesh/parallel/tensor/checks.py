"""Checks that the styles of a plan fit the model and each other, before anything is sharded."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ...utils.torch_private import is_compiled
from ..shard_spec import Split
from .attention import Attention
from .feature_styles import Colwise, ColwiseGather, Heads, Rowwise, RowwiseSplit, Vocab
from .plans import Assignment, assign, generalise, is_within
from .sequence_styles import SequenceBegin, SequenceEnd


def resolve(
    model: nn.Module, size: int, plan: str | Mapping[str, str] = "auto", sequence_parallel: bool = False
) -> tuple[list[Assignment], list[str]]:
    """The assignments that shard `model` over `size` ranks, and all problems."""
    assignments, problems = assign(model, plan, sequence_parallel)
    if any(is_compiled(module) for module in model.modules()):
        problems.append("the model is compiled already, and its layers cannot be sharded; pass it uncompiled")
    if plan == "auto":
        assignments += list(_shard_tied_weights(model, assignments))
    regions = [a.name for a in assignments if a.style.is_region]
    assignments = [replace(a, in_region=any(is_within(a.name, region) for region in regions)) for a in assignments]
    for a in assignments:
        problems += [f"{a}: {problem}" for problem in a.style.find_problems(a.module, size)]
    if not problems and not any(a.splits() for a in assignments):
        problems.append(_no_plan(model, plan))
    if not problems:
        problems += [*_find_inconsistent_ties(model, assignments), *_find_heads(model, assignments, plan)]
        shards_sequence = any(isinstance(a.style, (SequenceBegin, SequenceEnd)) for a in assignments)
        if sequence_parallel or shards_sequence:
            problems += _find_sequence_problems(model, assignments)
    return assignments, problems


def _owners(model: nn.Module) -> Collection[list[tuple[str, str]]]:
    """For each parameter the modules (by name) that have it, and its name there."""
    owners = defaultdict(list)
    for name, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[param].append((name, own))
    return owners.values()


def _find_splits(assignments: Sequence[Assignment]) -> dict[tuple[str, str], Split]:
    """The split of each sharded parameter, by the names of its module and of the parameter."""
    return {(a.name, own): split for a in assignments for own, split in a.splits().items()}


def _shard_tied_weights(model: nn.Module, assignments: Sequence[Assignment]) -> Iterator[Assignment]:
    """Under `plan="auto"`: an embedding and a head that share a weight are both sharded if one is."""
    splits = _find_splits(assignments)
    known = {(a.name, a.text) for a in assignments}
    for owners in _owners(model):
        if any(splits.get(owner) == Split(0) for owner in owners):
            for name, own in owners:
                module = model.get_submodule(name)
                new = (name, own) not in splits and (name, "vocab") not in known
                if new and isinstance(module, (nn.Embedding, nn.Linear)):
                    yield Assignment(name, module, Vocab(), "vocab", "auto")


def _find_inconsistent_ties(model: nn.Module, assignments: Sequence[Assignment]) -> Iterator[str]:
    splits = _find_splits(assignments)
    for owners in _owners(model):
        if len({splits.get(owner) for owner in owners}) > 1:
            uses = [f"{name}.{own} ({splits.get((name, own)) or 'whole'})" for name, own in owners]
            yield (
                f"one weight is shared by {' and '.join(uses)}, which would shard it differently; give these modules "
                "styles that shard it alike ('vocab' for an embedding and its head), or leave all of them whole"
            )


def _find_heads(model: nn.Module, assignments: Sequence[Assignment], plan: str | Mapping[str, str]) -> Iterator[str]:
    """Modules with a sharded projection and a number of heads that no style of the config's patterns has."""
    if isinstance(plan, str):
        return
    counted = {a.name for a in assignments if isinstance(a.style, Heads)}
    parents = {a.name.rpartition(".")[0] for a in assignments if isinstance(a.style, Colwise) and a.style.opens_fork}
    for parent in sorted(parents - counted):
        numbers = {name: n for name, n in vars(model.get_submodule(parent)).items() if type(n) is int}
        # num_heads, n_kv_heads, nhead, heads; but not head_dim
        found = [n for n in numbers if "head" in n and not any(w in n for w in ("dim", "size", "width", "features"))]
        if found:
            yield (
                f"{parent!r} has {found[0]}={numbers[found[0]]}, and its features are sharded; add "
                f"{generalise(parent)!r}: 'heads({', '.join(found)})' if its forward reads that number, or 'heads()' "
                "if it takes the number of heads from the shape (-1)"
            )


def _find_sequence_problems(model: nn.Module, assignments: Sequence[Assignment]) -> Iterator[str]:
    """Under sequence parallelism every layer between begin and end has to be known."""
    begins = {a.name for a in assignments if isinstance(a.style, SequenceBegin)}
    ends = {a.name for a in assignments if isinstance(a.style, SequenceEnd)}
    if not begins or not ends:
        yield (
            "sequence_parallel=True, but no plan says where the sequence is sharded ('sequence_begin') and where it is "
            "gathered ('sequence_end'); set sequence_parallel=False, or write a plan that does"
        )
        return
    between, inside = set(), False  # from each begin to the next end, in the order in which the model has its modules
    for name, _ in model.named_modules():
        inside = (inside or name in begins) and name not in ends
        if inside:
            between.add(name)
    for a in assignments:
        if isinstance(a.style, Attention) and a.name in between:
            yield (
                f"{a}: sequence_parallel=True does not support torch.nn.MultiheadAttention, which takes keys and "
                "values separately; set sequence_parallel=False"
            )
        elif (isinstance(a.style, Rowwise) or a.style.opens_fork) and a.name in between and not a.in_region:
            yield (
                f"{a}: under sequence_parallel=True it has to be in a 'region', which gathers the sequence; give that "
                "style to the module around it"
            )
        elif isinstance(a.style, RowwiseSplit) and a.in_region and not _gathers_before(a, assignments):
            yield (
                f"{a}: its input is that of its 'region', whose gradients are summed over the ranks, and each "
                "would give the whole gradient; use 'rowwise' after a 'colwise' layer, or leave it whole"
            )
        elif a.style.is_region and a.name not in between:
            yield (
                f"{a}: it is not between 'sequence_begin' and 'sequence_end', in the order in which the model has its "
                "modules, so its sequence is whole already; set sequence_parallel=False, or write a plan without this"
            )


def _gathers_before(split: Assignment, assignments: Sequence[Assignment]) -> bool:
    """Return True if a layer of the same region gathers features, as the input of `split`."""
    regions = [a.name for a in assignments if a.style.is_region and is_within(split.name, a.name)]
    gathers = [a.name for a in assignments if isinstance(a.style, ColwiseGather)]
    return any(is_within(name, region) for name in gathers for region in regions)


def _no_plan(model: nn.Module, plan: str | Mapping[str, str]) -> str:
    """The message for a model of which nothing would be sharded."""
    sizes: Counter[str] = Counter()
    for name, module in model.named_modules():
        layer = f"{generalise(name) or 'the model itself'} ({type(module).__name__})"
        sizes[layer] += sum(param.numel() for param in module.parameters(recurse=False))
    largest = ", ".join(f"{layer} with {count:,} numbers" for layer, count in sizes.most_common(5) if count)
    which = "no plan is registered for any layer of" if plan == "auto" else f"plan {plan!r} shards nothing of"
    return (
        f"{which} {type(model).__name__}. Its largest layers: {largest}. Write one: parallel = dict(tensor=dict("
        f"size=..., plan={_example(model)})), where 'colwise' Linear layers hand sharded features to 'rowwise' ones "
        "(docs/tensor-parallel.md); convolutions cannot be sharded: if most of the model is in them, leave tensor at 1"
    )


def _example(model: nn.Module) -> str:
    """An example plan for two adjacent Linear layers, of which one may follow the other."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for one, other in itertools.pairwise(linear):
        beside = one.rpartition(".")[0] == other.rpartition(".")[0]
        if beside and linear[one].out_features == linear[other].in_features:
            names = {generalise(one): "colwise", generalise(other): "rowwise"}
            return repr(names if len(names) == 2 else {one: "colwise", other: "rowwise"})
    return "{...}"
