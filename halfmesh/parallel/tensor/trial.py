"""Tries a plan before the first update: blocks are computed unsharded and sharded, and compared.

A plan that mixes features between a `colwise` and a `rowwise` layer (softmax, a norm, a fused gate) raises nothing, and
trains wrong weights. So one block of each kind is computed twice, with random weights: a model's initial weights may be
zero, and hide errors in the layers before them. Built-in plans are known to be right.

Only forwards are compared. If a backward is wrong after a right forward, the ranks get different gradients, which
`TensorGradients` rejects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...errors import InputError, bullet_list, find_module, shorten
from ...utils.log import get_logger
from ...utils.tensors import map_tensors, tensors_of
from ..comm import gather_objects
from ..registries import BUILTIN_TENSOR_PLANS
from ..trial import find_gap, is_within, meta_copy, no_side_effects
from .layers import TensorAxis
from .plans import Assignment, caller, splits_of
from .styles import Region, Rowwise, SequenceBegin, SequenceEnd

_log = get_logger(__name__)

_ADVICE = (
    "Between a 'colwise' and a 'rowwise' layer each rank has a part of the features: write sizes as -1, or divide them "
    "with 'heads(name)'; use 'fused_colwise(k)' for fused projections, and no softmax, norm or mean over features"
)
TOLERANCE = 2e-2
"""Relative to norms. Rounding makes far smaller differences, also in bf16; mixed features make far larger ones."""


@dataclass
class _Kind:
    """Blocks of one class that are sharded in the same way.

    Attributes:
        assignments: the assignments of modules in the first block.
        meta: an unsharded copy of it on the meta device, or the reason why it could not be made.
        names: the names of the blocks.
        live: the block that was called first in training.
        call: its arguments; activations are on the meta device.
    """

    assignments: list[Assignment]
    meta: nn.Module | str
    names: list[str] = field(default_factory=list)
    live: nn.Module | None = None
    call: Any = None


class PlanTrial:
    """Compares blocks of `model`, which is not sharded yet, with the same blocks sharded by a plan.

    A block is the smallest module around a `colwise` and a `rowwise` layer: its inputs and outputs are replicated.
    """

    def __init__(self, model: nn.Module, assignments: Sequence[Assignment], axis: TensorAxis) -> None:
        self._axis = axis
        self._kinds = _find_kinds(model, assignments)
        self._model = model
        self._watched: dict[nn.Module, _Kind] = {}
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Record the first call of the blocks of the model, which is sharded now."""
        self._watched = {self._model.get_submodule(name): kind for kind in self._kinds for name in kind.names}

        def without_activations(tensor: torch.Tensor) -> torch.Tensor:  # ids, masks and tables stay
            return torch.empty_like(tensor, device="meta") if tensor.requires_grad else tensor.detach()

        @torch.compiler.disable
        def note(block: nn.Module, args: Any, kwargs: Any) -> None:
            kind = self._watched.get(block)  # None: a block of a copy of the model
            trains = block.training and torch.is_grad_enabled()
            if trains and kind is not None and kind.call is None:
                kind.live, kind.call = block, map_tensors(without_activations, (args, kwargs))

        self._hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in self._watched]

    def close(self) -> None:
        """Compare nothing from now on. (A pipeline's copy of the model still has the hooks.)"""
        for hook in self._hooks:
            hook.remove()
        self._watched.clear()
        self._kinds = []

    def explain(self, error: RuntimeError) -> None:
        """Name the module of an error; in the first forwards the cause is most often a size of the full model."""
        if self._kinds:
            where = find_module(self._model, error)
            error.add_note(f"In {where}, with tensor={self._axis.size}. parallel.tensor.plan: {_ADVICE}")

    def run(self) -> None:
        """Compare. All ranks together, after the first backward.

        Raises:
            InputError: a block computes something else; on all ranks, also on other stages of a pipeline.
        """
        kinds = self._kinds
        if not kinds:
            return
        self.close()
        results: dict[str, float | str] = {kind.names[0]: "it was not called as a module" for kind in kinds}
        for theirs in gather_objects({kind.names[0]: self._try_out(kind) for kind in kinds if kind.live is not None}):
            results |= theirs
        wrong, untried = [], []
        for kind, gap in zip(kinds, results.values(), strict=True):
            if isinstance(gap, str):
                untried.append(f"{kind.names[0] or 'the model'} ({gap})")
            elif gap > TOLERANCE:
                names = shorten([name or "the model" for name in kind.names], 1)
                plan = {a.plan: a.text for a in kind.assignments}
                wrong.append(f"{names} ({type(kind.meta).__name__}): its output differs by {gap:.0%}. The plan: {plan}")
        if wrong:
            title = f"in a trial before any update, some blocks compute something else over tensor={self._axis.size}"
            raise InputError(bullet_list(f"{title}. {_ADVICE}:", wrong))
        if untried:
            message = "parallel.tensor.plan: could not verify %s; compare a few steps with one process (tensor=1)"
            _log.warning(message, ", ".join(untried))

    def _try_out(self, kind: _Kind) -> float | str:
        """The difference of a sharded block from the unsharded one; or why it is not known. All ranks of the group.

        Both run in evaluation mode, in fp32 (fp64 stays), with full sequences. Random states are restored.
        """
        device = self._axis.device
        self._axis.end_tp_region()
        with no_side_effects((), device) as effects, torch.autocast(device.type, enabled=False):
            try:
                block = _with_random_weights(kind, device)
                whole = _outputs(block, kind.call, device)
                problem = "it draws random numbers also in evaluation" if effects.drew() else ""
            except Exception as error:  # any error of the block
                problem = f"computing it whole failed: {error!r}"
            # A rank may fail alone (out of memory); the others would wait for it in the block's own collectives.
            if problem := max(gather_objects(problem, self._axis.group)):
                return problem
            try:
                _shard(block, kind, self._axis)
                found = _outputs(block, kind.call, device)
                # Outputs of another shape, such as attention weights of this rank's heads, are left out.
                pairs = [(a, b) for a, b in zip(whole, found, strict=True) if a.shape == b.shape]
                return find_gap(*zip(*pairs, strict=True)) if pairs else 1.0
            except Exception as error:
                return f"computing it sharded failed: {error!r}"
            finally:
                self._axis.end_tp_region()


def _find_kinds(model: nn.Module, assignments: Sequence[Assignment]) -> list[_Kind]:
    found: dict[str, _Kind] = {}
    for name in _find_blocks(model, assignments):
        block = model.get_submodule(name)
        inside = [a for a in assignments if is_within(a.name, name)]
        key = f"{type(block)} {block} {[(a.name[len(name) :], a.text) for a in inside]}"
        if key not in found:
            try:
                found[key] = _Kind(inside, meta_copy(block, model))
            except Exception as error:
                found[key] = _Kind(inside, f"it cannot be copied: {error}")
        found[key].names.append(name)
    return list(found.values())


def _find_blocks(model: nn.Module, assignments: Sequence[Assignment]) -> list[str]:
    """Names of the smallest modules around a layer that a user's plan shards and one that ends its region."""
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


def _with_random_weights(kind: _Kind, device: torch.device) -> nn.Module:
    """An unsharded block in evaluation mode, with buffers and other tensors of the live one."""
    assert kind.live is not None
    if isinstance(kind.meta, str):
        raise InputError(kind.meta)
    block = kind.meta.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(1)
    for param in block.parameters():
        if param.is_floating_point():  # so uneven that a difference shows if a rank's features are taken for all
            value = torch.randn(param.shape, generator=generator, dtype=_wide(param), device=device)
            value = value / param.shape[-1] ** 0.5 if param.dim() > 1 else 1 + 0.1 * value
            for dim, n in enumerate(param.shape):
                value = value * torch.linspace(0.5, 1.5, n, device=device).view(-1, *[1] * (param.dim() - dim - 1))
            param.data = value
    for name, module in block.named_modules():
        source = kind.live.get_submodule(name)
        for own, value in (*source.named_buffers(recurse=False), *vars(source).items()):
            if isinstance(value, torch.Tensor):
                setattr(module, own, value.detach().to(_wide(value), copy=True))
    return block


def _shard(block: nn.Module, kind: _Kind, axis: TensorAxis) -> None:
    """Shard `block` as in the model, but not along the sequence."""
    inside = [
        replace(a, module=block.get_submodule(a.name[len(kind.names[0]) :].lstrip(".")), in_region=False)
        for a in kind.assignments
        if not isinstance(a.style, (Region, SequenceBegin, SequenceEnd))
    ]
    for param, split in splits_of(inside).items():
        param.data = split.cut(param.data, axis.rank, axis.size)
    for a in inside:
        a.install(axis)


def _outputs(block: nn.Module, call: Any, device: torch.device) -> list[torch.Tensor]:
    """The floating-point tensors that a forward returns, for random activations that are the same on all ranks."""
    generator = torch.Generator(device).manual_seed(2)

    def given(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(_wide(tensor), copy=True)
        return torch.randn(tensor.shape, generator=generator, dtype=_wide(tensor), device=device)

    args, kwargs = map_tensors(given, call)
    return [output for output in tensors_of(block(*args, **kwargs)) if output.is_floating_point()]


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of `tensor`, at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
