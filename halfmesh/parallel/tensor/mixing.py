"""Why a block that is sharded computes something else: what in it may look at several features at once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from .feature_styles import Colwise, Rowwise
from .plans import Assignment

_LAYERS = re.compile(r"Soft(max|min)|Norm|GLU|Shuffle|Unflatten")
_CALLS = re.compile(
    r"\b(?:(?:log_)?soft(?:max|min)|\w+_norm|normalize|norm|glu|chunk|split|view|reshape|unflatten|einsum|logsumexp|"
    r"mean|sum|std|var|a?max|a?min|arg\w+|topk|sort|flip|roll|gather|cum\w+)\("
)
_MOST_LINES = 4


def describe(
    names: Sequence[str],
    block: nn.Module,
    assignments: Sequence[Assignment],
    apart: float,
    what: str,
) -> str:
    """What to say of blocks that compute something else when they are sharded, and how to change it.

    Args:
        block: one of them, sharded.
        assignments: what the plan does to modules of one of them.
        apart, what: how far off which result is, relative to its norm.
    """
    plan = {a.plan: a.text for a in assignments}
    others = f", and {len(names) - 1} more like it" if len(names) > 1 else ""
    causes = [*_fused(assignments), *_layers(block), *_lines(block)]
    likely = f" Look at: {'; '.join(causes)}." if causes else ""
    return (
        f"{names[0] or 'the model'} ({type(block).__name__}{others}): {what} differs by {min(apart, 9.99):.0%}. "
        f"The plan: {plan}. Between a 'colwise' and a 'rowwise' layer each rank has some of the features, so "
        f"nothing there may look at several at once.{likely} Projections in one weight need 'fused_colwise(k)'; a "
        "number of heads has to be this rank's, 'heads(name)', or -1; around a softmax, a norm or a mean over all "
        "features leave the layers whole: take their patterns out of the plan"
    )


def _fused(assignments: Sequence[Assignment]) -> Iterator[str]:
    taken = {a.name: _features(a) for a in assignments if isinstance(a.style, Rowwise)}
    for a in assignments:
        if isinstance(a.style, Colwise) and a.style.blocks == 1 and not a.style.gathers:
            for name, features in taken.items():
                times, rest = divmod(_features(a), features)
                if times > 1 and not rest:
                    yield (
                        f"{a.name} gives {times} times the features that {name} takes: if they are {times} projections "
                        f"in one weight, {a.plan!r} has to be 'fused_colwise({times})'"
                    )
                    break


def _features(assignment: Assignment) -> int:
    """How many of them are divided."""
    weight = assignment.module.get_parameter("weight")
    return weight.shape[assignment.style.splits(assignment.module)["weight"].dim]


def _layers(block: nn.Module) -> Iterator[str]:
    """Modules without weights; others would not fit the number of features."""
    for name, module in block.named_modules():
        kind = type(module).__name__
        if name and _LAYERS.search(kind) and not [*module.parameters(), *module.children()]:
            yield f"{name} is a {kind}"


def _lines(block: nn.Module) -> Iterator[str]:
    found = []
    for kind in dict.fromkeys(kind for module in block.modules() for kind in type(module).__mro__):
        if kind.__module__.partition(".")[0] in ("torch", "halfmesh", "builtins"):
            continue
        try:
            lines, first = inspect.getsourcelines(kind)
            file = Path(inspect.getsourcefile(kind) or "").name
        except (OSError, TypeError):  # made in a shell
            continue
        for number, line in enumerate(lines, first):
            if _CALLS.search(line):
                found.append(f"{file}:{number} `{line.strip()}`")
    yield from found[:_MOST_LINES]
