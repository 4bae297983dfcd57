"""Whether what a plan of the user's own shards computes what it did before: tried out before the first update.

A plan that mixes features between a `colwise` and a `rowwise` layer (softmax, a norm, a fused gate) raises nothing, and
trains wrong weights. So one block of each kind is computed whole and sharded. Its weights are random ones: those that a
model starts with may be zero, and hide what comes before them. Plans that halfmesh brings are known to be right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..._torch import in_shapes_only
from ...errors import InputError, bullet_list, shorten
from ...log import get_logger
from ...tensors import map_tensors
from ..modules import meta_copy
from ..objects import gather_objects, is_alone
from ..registries import BUILTIN_TENSOR_PLANS
from .axis import TensorAxis
from .block_trial import TOLERANCE, compare, without_activations
from .checks import ResolvedPlan
from .feature_styles import Rowwise
from .mixing import describe
from .plans import Assignment, caller
from .style import Style

_log = get_logger(__name__)


@dataclass
class _Kind:
    """Blocks of one class that are sharded alike.

    Attributes:
        names: of the blocks.
        assignments: what the plan does to modules of the first one.
        meta: a copy of it, whole and without memory; or why there is none.
        live: the block that was called first in training.
        call: its arguments, through `without_activations`.
    """

    names: list[str]
    assignments: list[Assignment]
    meta: nn.Module | str
    live: nn.Module | None = None
    call: Any = None

    @property
    def styles(self) -> list[tuple[str, Style]]:
        """Those of modules by their names within a block."""
        return [(a.name[len(self.names[0]) :].lstrip("."), a.style) for a in self.assignments]

    def watch(self, model: nn.Module) -> Iterator[Any]:
        """Hooks that note the first call of one of the blocks."""
        blocks = {model.get_submodule(name) for name in self.names}

        @torch.compiler.disable
        def note(block: nn.Module, args: Any, kwargs: Any) -> None:
            trains = block.training and torch.is_grad_enabled() and not in_shapes_only()
            if trains and self.call is None and block in blocks:  # copies of the model have this hook, too
                self.live, self.call = block, map_tensors(without_activations, (args, kwargs))

        for block in blocks:
            yield block.register_forward_pre_hook(note, with_kwargs=True)


@dataclass(frozen=True)
class _Findings:
    """What a rank has found out, by the first names of kinds."""

    called: set[str] = field(default_factory=set)
    wrong: dict[str, str] = field(default_factory=dict)
    untried: dict[str, str] = field(default_factory=dict)


class PlanCheck:
    """Compares blocks of `model`, which is whole yet, with what `plan` makes of them.

    A block is the smallest module around a `colwise` and a `rowwise` layer: what it takes and returns is whole.
    """

    def __init__(self, model: nn.Module, plan: ResolvedPlan, axis: TensorAxis) -> None:
        self._axis = axis
        self._kinds = [] if is_alone(axis.group) else _find_kinds(model, plan.assignments)
        self._hooks: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Note how the blocks of `model`, which is sharded now, are called."""
        self._hooks = [hook for kind in self._kinds for hook in kind.watch(model)]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def explain(self, error: RuntimeError) -> None:
        """Say what an error in the first forwards may come from: most often sizes that are those of the whole model."""
        if self._kinds:
            names = shorten([kind.names[0] or "the model" for kind in self._kinds])
            error.add_note(
                f"parallel.tensor.plan shards {names}. Between a 'colwise' and a 'rowwise' layer each rank has 1 / "
                f"{self._axis.size} of the features: write sizes there as -1, or take them from numbers of the module "
                "that the style 'heads(name, ...)' makes this rank's (docs/tensor-parallel.md)"
            )

    def run(self) -> None:
        """Compare. All ranks together, after the first backward.

        Raises:
            InputError: a block computes something else; on all ranks, also on other stages of a pipeline.
        """
        if not self._kinds:
            return
        self.close()
        everyone: list[_Findings] = gather_objects(self._find_out())
        wrong = {name: text for theirs in everyone for name, text in theirs.wrong.items()}
        if wrong:
            inner = [name for name in wrong if not any(_is_in(other, name) for other in wrong if other != name)]
            raise InputError(
                bullet_list(
                    f"{len(inner)} kind(s) of block compute something else when they are sharded over tensor="
                    f"{self._axis.size} (tried out with random weights). No update was made:",
                    [wrong[name] for name in inner],
                )
            )
        called = {name for theirs in everyone for name in theirs.called}
        untried = {k.names[0]: "it was not called as a module" for k in self._kinds if k.names[0] not in called}
        untried |= {name: why for theirs in everyone for name, why in theirs.untried.items()}
        self._kinds = []  # with them goes what was kept of calls
        for name, why in untried.items():
            _log.warning(
                "parallel.tensor.plan: whether %s computes the same when it is sharded could not be tried out before "
                "the first update (%s); compare a few steps with one process (tensor=1)",
                name or "the model",
                why,
            )

    def _find_out(self) -> _Findings:
        found = _Findings()
        for kind in self._kinds:
            name = kind.names[0]
            if kind.live is None:
                continue
            found.called.add(name)
            if isinstance(kind.meta, str):
                found.untried[name] = kind.meta
                continue
            gap = compare(kind.meta, kind.live, kind.call, kind.styles, self._axis)
            if isinstance(gap, str):
                found.untried[name] = gap
            elif gap[0] > TOLERANCE:
                found.wrong[name] = describe(kind.names, kind.live, kind.assignments, *gap)
        return found


def _find_kinds(model: nn.Module, assignments: Sequence[Assignment]) -> list[_Kind]:
    found: dict[str, _Kind] = {}
    for name in _find_blocks(model, assignments):
        block = model.get_submodule(name)
        inside = [a for a in assignments if _is_in(a.name, name)]
        styles = [(a.name[len(name) :], a.text) for a in inside]
        key = f"{styles} {[_look(module) for module in block.modules()]}"
        if key in found:
            found[key].names.append(name)
            continue
        try:
            meta: nn.Module | str = meta_copy(block, model)
        except Exception as error:
            meta = f"it cannot be copied: {error}"
        found[key] = _Kind([name], inside, meta)
    return list(found.values())


def _find_blocks(model: nn.Module, assignments: Sequence[Assignment]) -> list[str]:
    """Names of the smallest modules around a layer that a plan of the user's shards and one that ends what it began."""
    modules = dict(model.named_modules())
    begins = {a.name for a in assignments if a.style.opens_fork}
    ends = {a.name for a in assignments if isinstance(a.style, Rowwise) and not a.style.splits_input}
    around = [{top for name in names for top in _upwards(name)} for names in (begins, ends)]
    found: dict[str, None] = {}
    for a in assignments:
        if a.plan not in BUILTIN_TENSOR_PLANS and a.name in begins | ends:
            name = a.name
            while name and not all(name in tops for tops in around):
                name = caller(modules, name)
            found[name] = None
    return list(found)


def _upwards(name: str) -> Iterator[str]:
    """`name`, and the names of the modules that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _is_in(name: str, top: str) -> bool:
    return not top or name == top or name.startswith(f"{top}.")


def _look(module: nn.Module) -> object:
    """What may decide how a module computes. (Numbers are left out: many modules have one of their own.)"""
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and name != "training"}
    switches = {name: value for name, value in own.items() if value is None or isinstance(value, (bool, str))}
    calls = {name: getattr(value, "__qualname__", type(value)) for name, value in own.items() if callable(value)}
    return type(module), module.extra_repr(), switches, calls
