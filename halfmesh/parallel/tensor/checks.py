"""Whether assigned styles fit the model and each other; before anything is cut."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..._torch import is_compiled
from ..shard_spec import Split
from .attention import Attention
from .feature_styles import Colwise, Heads, Rowwise, Vocab
from .plans import Assignment, assign, generalise, is_within
from .sequence_styles import SequenceBegin, SequenceEnd

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class ResolvedPlan:
    """What is done to each module of a model, checked."""

    assignments: tuple[Assignment, ...]
    size: int

    @property
    def regions(self) -> list[str]:
        """Names of modules within which the sequence is whole; none without sequence parallelism."""
        return [a.name for a in self.assignments if a.style.is_region]

    def in_region(self, name: str) -> bool:
        """Whether the module is in a region."""
        return any(is_within(name, region) for region in self.regions)


def resolve(
    model: nn.Module, size: int, plan: str | Mapping[str, str] = "auto", sequence_parallel: bool = False
) -> tuple[ResolvedPlan, list[str]]:
    """How `model` is divided over `size` ranks, and every reason why it cannot be."""
    assignments, problems = assign(model, plan, sequence_parallel)
    if any(is_compiled(module) for module in model.modules()):
        problems.append("the model is compiled, and its layers cannot be divided any more; pass it uncompiled")
    if plan == "auto":
        assignments = [*assignments, *_divide_tied_weights(model, assignments)]
    resolved = ResolvedPlan(tuple(assignments), size)
    if not problems and not any(a.style.splits(a.module) for a in assignments if _fits(a)):
        problems.append(_no_plan(model, plan))
    for a in assignments:
        problems += [f"{a}: {problem}" for problem in a.style.find_problems(a.module, size)]
    if not problems:
        problems += [*_find_inconsistent_ties(model, assignments), *_find_heads(model, assignments, plan)]
        problems += _find_sequence_problems(model, resolved) if sequence_parallel else ()
    return resolved, problems


def _fits(assignment: Assignment) -> bool:
    return not list(assignment.style.find_problems(assignment.module, 1))


def _owners(model: nn.Module) -> dict[int, list[tuple[str, str]]]:
    """For each parameter the modules (by name) that have it, and its name there."""
    owners = defaultdict(list)
    for name, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[id(param)].append((name, own))
    return owners


def _cuts(assignments: Sequence[Assignment]) -> dict[tuple[str, str], Split]:
    """The split of each parameter, by the names of its module and of its own."""
    return {(a.name, own): split for a in assignments if _fits(a) for own, split in a.style.splits(a.module).items()}


def _divide_tied_weights(model: nn.Module, assignments: Sequence[Assignment]) -> Iterator[Assignment]:
    """Under `plan="auto"`: an embedding and a head that share a weight are divided both when one is."""
    modules, cuts = dict(model.named_modules()), _cuts(assignments)
    known = {(a.name, a.text) for a in assignments}
    for owners in _owners(model).values():
        if any(cuts.get(owner) == Split(0) for owner in owners):
            for name, own in owners:
                new = (name, own) not in cuts and (name, "vocab") not in known
                if new and isinstance(modules[name], (nn.Embedding, nn.Linear)):
                    yield Assignment(name, modules[name], Vocab(), "vocab", "auto")


def _find_inconsistent_ties(model: nn.Module, assignments: Sequence[Assignment]) -> Iterator[str]:
    cuts = _cuts(assignments)
    for owners in _owners(model).values():
        if len({cuts.get(owner) for owner in owners}) > 1:
            uses = [f"{name}.{own} ({cuts.get((name, own)) or 'whole'})" for name, own in owners]
            yield (
                f"one weight is shared by {' and '.join(uses)}, which would divide it differently; give these modules "
                "styles that divide it alike ('vocab' for an embedding and its head), or leave all of them whole"
            )


def _find_heads(model: nn.Module, assignments: Sequence[Assignment], plan: str | Mapping[str, str]) -> Iterator[str]:
    """A divided projection in a module that counts heads, and nobody has said what becomes of the count."""
    if isinstance(plan, str):
        return
    modules = dict(model.named_modules())
    counted = {a.name for a in assignments if isinstance(a.style, Heads)}
    parents = {a.name.rpartition(".")[0] for a in assignments if isinstance(a.style, Colwise) and a.style.opens_fork}
    for parent in sorted(parents - counted):
        found = [name for name, value in vars(modules[parent]).items() if type(value) is int and _counts_heads(name)]
        if found:
            yield (
                f"{parent!r} has {found[0]}={getattr(modules[parent], found[0])}, and its features are divided; add "
                f"{generalise(parent)!r}: 'heads({', '.join(found)})' if its forward reads that number, or 'heads()' "
                "if it takes the number of heads from the shape (-1)"
            )


def _counts_heads(name: str) -> bool:
    """Whether an attention module's attribute of that name may count heads: num_heads, n_kv_heads, nhead, heads."""
    return "head" in name and not any(part in name for part in ("dim", "size", "width", "features"))


def _find_sequence_problems(model: nn.Module, plan: ResolvedPlan) -> Iterator[str]:
    """Under sequence parallelism all that lies between begin and end has to be known."""
    kinds = Counter(type(a.style) for a in plan.assignments)
    if not kinds[SequenceBegin] or not kinds[SequenceEnd]:
        yield (
            "sequence_parallel=True, but no plan says where the sequence is divided ('sequence_begin') and where it is "
            "whole again ('sequence_end'); set sequence_parallel=False, or write a plan that does"
        )
        return
    divided = _names_with_divided_sequence(model, plan)
    for a in plan.assignments:
        divides = isinstance(a.style, Rowwise) or a.style.opens_fork
        if isinstance(a.style, Attention) and a.name in divided:
            yield (
                f"{a}: sequence_parallel=True does not know torch.nn.MultiheadAttention, whose keys and values are "
                "inputs of their own; set sequence_parallel=False"
            )
        elif divides and a.name in divided and not plan.in_region(a.name):
            yield (
                f"{a}: under sequence_parallel=True it has to be in a 'region', which makes the sequence whole; give "
                "that style to the module around it"
            )
        elif a.style.is_region and a.name not in divided:
            yield (
                f"{a}: it is not between 'sequence_begin' and 'sequence_end', in the order in which the model has its "
                "modules, so its sequence is whole already; set sequence_parallel=False, or write a plan without this"
            )
    handled = _handled_params(plan)
    blocks = {region.rpartition(".")[0] for region in plan.regions}
    for name, param in model.named_parameters(remove_duplicate=False):
        if any(is_within(name, block) for block in blocks) and id(param) not in handled and param.requires_grad:
            yield (
                f"{name} is in a layer whose activations are divided along the sequence, and no plan says whether its "
                "gradient is; give its module the style 'sequence' (outside a region) or 'partial' (inside one)"
            )


def _names_with_divided_sequence(model: nn.Module, plan: ResolvedPlan) -> set[str]:
    """The modules from each 'sequence_begin' to the next 'sequence_end', in the order in which the model has them."""
    begins = {a.name for a in plan.assignments if isinstance(a.style, SequenceBegin)}
    ends = {a.name for a in plan.assignments if isinstance(a.style, SequenceEnd)}
    names, inside = set(), False
    for name, _ in model.named_modules():
        inside = (inside or name in begins) and name not in ends
        if inside:
            names.add(name)
    return names


def _handled_params(plan: ResolvedPlan) -> set[int]:
    handled = set()
    for a in plan.assignments:
        cut = a.style.splits(a.module)
        own = dict(a.module.named_parameters(recurse=False, remove_duplicate=False))
        handled |= {id(own[name]) for name in cut}
        handled |= {id(param) for param in a.style.partial(a.module, plan.in_region(a.name))}
    return handled


def _no_plan(model: nn.Module, plan: str | Mapping[str, str]) -> str:
    """What to do about a model of which nothing would be divided."""
    sizes: Counter[str] = Counter()
    convolutions = 0
    for name, module in model.named_modules():
        own = sum(param.numel() for param in module.parameters(recurse=False))
        if own:
            sizes[f"{generalise(name) or 'the model itself'} ({type(module).__name__})"] += own
            convolutions += own if isinstance(module, _CONVOLUTIONS) else 0
    largest = ", ".join(f"{layer} with {count:,} numbers" for layer, count in sizes.most_common(5))
    which = "no plan is registered for any layer of" if plan == "auto" else f"plan {plan!r} divides nothing of"
    if 2 * convolutions > sizes.total():
        advice = (
            "Convolutions are not divided over tensor ranks, and most of this model is in them; leave tensor at 1, and "
            "use the ranks for data parallelism (parallel.data = 'fsdp' divides what they hold) or for a pipeline"
        )
    else:
        advice = (
            "Write one: parallel = dict(tensor=dict(size=..., plan={'*.fc1': 'colwise', '*.fc2': 'rowwise'})), where "
            "'colwise' layers hand divided features to 'rowwise' ones (docs/tensor-parallel.md)"
        )
    return f"{which} {type(model).__name__}. Its largest layers: {largest}. {advice}"
