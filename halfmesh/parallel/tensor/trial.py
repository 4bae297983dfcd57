"""A plan of the user's own is tried out before the first update: blocks are computed whole and sharded, and compared.

A plan that mixes features between a `colwise` and a `rowwise` layer (softmax, a norm, a fused gate) raises nothing, and
trains wrong weights. So one block of each kind is computed twice. Its weights are random ones: those that a model
starts with may be zero, and hide what comes before them. Plans that halfmesh brings are known to be right.

Forwards are compared only. A backward that is wrong after a right forward gives the ranks of the group different
gradients, which `gradients` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..._torch import in_shapes_only
from ...errors import InputError, bullet_list, shorten
from ...log import get_logger
from ...tensors import map_tensors, tensors_of
from ..modules import meta_copy
from ..objects import gather_objects, is_alone
from ..registries import BUILTIN_TENSOR_PLANS
from .checks import ResolvedPlan
from .feature_styles import Rowwise
from .layers import TensorAxis
from .plans import Assignment, caller, is_within
from .sequence_styles import GatherSequence, SequenceBegin, SequenceEnd

_log = get_logger(__name__)

TOLERANCE = 2e-2
"""Of norms. Rounding does far less, in bf16 too; mixed features differ by far more where weights are as uneven."""


@dataclass
class _Kind:
    """Blocks of one class that are sharded alike.

    Attributes:
        names: of the blocks.
        block: the name of their class.
        assignments: what the plan does to modules of the first one.
        meta: a copy of it, whole and without memory; or why there is none.
        live: the block that was called first in training.
        call: its arguments; of activations the shape only.
    """

    names: list[str]
    block: str
    assignments: list[Assignment]
    meta: nn.Module | str
    live: nn.Module | None = None
    call: Any = None

    def watch(self, model: nn.Module) -> Iterator[Any]:
        """Hooks that note the first call of one of the blocks."""
        blocks = {model.get_submodule(name) for name in self.names}

        @torch.compiler.disable
        def note(block: nn.Module, args: Any, kwargs: Any) -> None:
            trains = block.training and torch.is_grad_enabled() and not in_shapes_only()
            if trains and self.call is None and block in blocks:  # copies of the model have this hook, too
                self.live, self.call = block, map_tensors(_without_activations, (args, kwargs))

        for block in blocks:
            yield block.register_forward_pre_hook(note, with_kwargs=True)

    def describe(self, gap: float, size: int) -> str:
        """What to say of blocks whose outputs are `gap` apart, and how to change it."""
        plan = {a.plan: a.text for a in self.assignments}
        others = f", and {len(self.names) - 1} more like it" if len(self.names) > 1 else ""
        return (
            f"{self.names[0] or 'the model'} ({self.block}{others}): its output differs by "
            f"{min(gap, 9.99):.0%}. The plan: {plan}. Between a 'colwise' and a 'rowwise' layer each rank has "
            f"1 / {size} of the features, so nothing there may look at several at once. Projections in one weight need "
            "'fused_colwise(k)'; a number of heads has to be this rank's, 'heads(name)', or -1; around a softmax, a "
            "norm or a mean over all features leave the layers whole: take their patterns out of the plan"
        )


class PlanTrial:
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
        tried = {kind.names[0]: self._try_out(kind) for kind in self._kinds if kind.live is not None}
        everyone: list[dict[str, float | str]] = gather_objects(tried)
        found = {name: result for theirs in everyone for name, result in theirs.items()}
        gaps = [(name, gap) for theirs in everyone for name, gap in theirs.items() if not isinstance(gap, str)]
        wrong = {name: gap for name, gap in gaps if gap > TOLERANCE}
        inner = [name for name in wrong if not any(is_within(other, name) for other in wrong if other != name)]
        if inner:
            lines = [k.describe(wrong[k.names[0]], self._axis.size) for k in self._kinds if k.names[0] in inner]
            raise InputError(
                bullet_list(
                    f"{len(inner)} kind(s) of block compute something else when they are sharded over tensor="
                    f"{self._axis.size} (tried out with random weights). No update was made:",
                    lines,
                )
            )
        for name in [kind.names[0] for kind in self._kinds]:
            why = found.get(name, "it was not called as a module")
            if isinstance(why, str):
                _log.warning(
                    "parallel.tensor.plan: whether %s computes the same when it is sharded could not be tried out "
                    "before the first update (%s); compare a few steps with one process (tensor=1)",
                    name or "the model",
                    why,
                )
        for kind in self._kinds:  # a pipeline's copy of the model still has the hooks, which hold these
            kind.meta, kind.live, kind.call = "", None, None
        self._kinds = []

    def _try_out(self, kind: _Kind) -> float | str:
        """How far a sharded block is from the whole one; or why that cannot be found out. The whole group together.

        Both are computed in evaluation, in fp32 (fp64 stays), with whole sequences. Random numbers stay as they are.
        """
        device = self._axis.device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            self._axis.end_tp_region()
            problem, whole = "", list[torch.Tensor]()
            try:
                block = _with_random_weights(kind, device)
                before = _random_state(device)
                whole = _outputs(block, kind.call, device)
                if not torch.equal(before, _random_state(device)):
                    problem = "it draws random numbers in evaluation, too"
            except Exception as error:  # whatever the block does
                problem = f"computing it by itself failed: {_first_line(error)}"
            for theirs in gather_objects(problem, self._axis.group):  # before collectives of the block's
                if theirs:
                    return str(theirs)
            try:
                _shard(block, kind, self._axis)
                return _gap(whole, _outputs(block, kind.call, device))
            except Exception as error:
                return f"computing it sharded failed: {_first_line(error)}"
            finally:
                self._axis.end_tp_region()


def _find_kinds(model: nn.Module, assignments: Sequence[Assignment]) -> list[_Kind]:
    found: dict[str, _Kind] = {}
    for name in _find_blocks(model, assignments):
        block = model.get_submodule(name)
        inside = [a for a in assignments if is_within(a.name, name)]
        styles = [(a.name[len(name) :], a.text) for a in inside]
        key = f"{styles} {[_look(module) for module in block.modules()]}"
        if key in found:
            found[key].names.append(name)
            continue
        try:
            meta: nn.Module | str = meta_copy(block, model)
        except Exception as error:
            meta = f"it cannot be copied: {error}"
        found[key] = _Kind([name], type(block).__name__, inside, meta)
    return list(found.values())


def _find_blocks(model: nn.Module, assignments: Sequence[Assignment]) -> list[str]:
    """Names of the smallest modules around a layer that a plan of the user's shards and one that ends what it began."""
    modules = dict(model.named_modules())
    begins = {a.name for a in assignments if a.style.opens_fork}
    ends = {a.name for a in assignments if isinstance(a.style, Rowwise) and not a.style.splits_input}
    found: dict[str, None] = {}
    for a in assignments:
        if a.plan not in BUILTIN_TENSOR_PLANS and a.name in begins | ends:
            name = a.name
            while name and not all(any(is_within(inner, name) for inner in names) for names in (begins, ends)):
                name = caller(modules, name)
            found[name] = None
    return list(found)


def _look(module: nn.Module) -> object:
    """What may decide how a module computes. (Numbers are left out: many modules have one of their own.)"""
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and name != "training"}
    switches = {name: value for name, value in own.items() if value is None or isinstance(value, (bool, str))}
    calls = {name: getattr(value, "__qualname__", type(value)) for name, value in own.items() if callable(value)}
    return type(module), module.extra_repr(), switches, calls


def _without_activations(tensor: torch.Tensor) -> torch.Tensor:
    """Of an argument of a block what a trial needs: ids, masks and tables themselves, of activations the shape."""
    return torch.empty_like(tensor, device="meta") if tensor.requires_grad else tensor.detach()


def _with_random_weights(kind: _Kind, device: torch.device) -> nn.Module:
    """A whole block in evaluation, with buffers and other tensors of the one that trains."""
    assert kind.live is not None
    if isinstance(kind.meta, str):
        raise InputError(kind.meta)
    block = kind.meta.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(1)
    for param in block.parameters():
        if param.is_floating_point():
            param.data = _random_weight(param, generator)
    sources = dict(kind.live.named_modules())
    for name, module in block.named_modules():
        held = dict(sources[name].named_buffers(recurse=False))
        held |= {own: value for own, value in vars(sources[name]).items() if isinstance(value, torch.Tensor)}
        for own, value in held.items():
            setattr(module, own, value.detach().to(_wide(value), copy=True))
    return block


def _random_weight(param: nn.Parameter, generator: torch.Generator) -> torch.Tensor:
    """So uneven that it shows where some of the features were taken for all."""
    shape = param.shape
    options: dict[str, Any] = {"dtype": _wide(param), "device": generator.device}
    value = torch.randn(shape, generator=generator, **options)
    value = value / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.1 * value
    for dim, n in enumerate(shape):
        value = value * torch.linspace(0.5, 1.5, n, **options).view(-1, *(1 for _ in shape[dim + 1 :]))
    return value


def _shard(block: nn.Module, kind: _Kind, axis: TensorAxis) -> None:
    """Shard `block` as the model is, but for the sequence."""
    along = (GatherSequence, SequenceBegin, SequenceEnd)
    styles = [(a.name[len(kind.names[0]) :].lstrip("."), a.style) for a in kind.assignments]
    modules = [(block.get_submodule(name), style) for name, style in styles if not isinstance(style, along)]
    splits = {module.get_parameter(name): s for module, style in modules for name, s in style.splits(module).items()}
    for param, split in splits.items():
        param.data = split.cut(param.data, axis.rank, axis.size)
    for module, style in modules:
        style.install(module, axis, False)


def _outputs(block: nn.Module, call: Any, device: torch.device) -> list[torch.Tensor]:
    """What a forward returns, of floating-point numbers, with random activations that are the same on all ranks."""
    generator = torch.Generator(device).manual_seed(2)

    def given(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(_wide(tensor), copy=True)
        return torch.randn(tensor.shape, generator=generator, dtype=_wide(tensor), device=device)

    args, kwargs = map_tensors(given, call)
    return [output for output in tensors_of(block(*args, **kwargs)) if output.is_floating_point()]


def _gap(whole: Sequence[torch.Tensor], sharded: Sequence[torch.Tensor]) -> float:
    """The largest difference of two outputs, relative to the norm of the whole one. Those of another shape (attention
    weights of this rank's heads) are passed over."""
    pairs = [(a, b) for a, b in zip(whole, sharded, strict=True) if a.shape == b.shape]
    if not pairs:
        return 1.0
    finite = [(a.isfinite(), a, b) for a, b in pairs]
    norms = [float(torch.linalg.vector_norm(a[here])) for here, a, _ in finite]
    apart = [float(torch.linalg.vector_norm((b - a)[here].nan_to_num())) for here, a, b in finite]
    return max(gap / max(norm, 1e-30) for gap, norm in zip(apart, norms, strict=True))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """fp32 for what is narrower."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
