"""One block computed whole and sharded, forward and backward, with random weights: how far apart the results are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...tensors import map_tensors
from ..objects import gather_objects
from ..shard_spec import Split
from .axis import TensorAxis
from .sequence_styles import Region, SequenceBegin, SequenceEnd
from .style import Style

TOLERANCE = 2e-2
"""Of norms. Rounding does far less, in bf16 too; mixed features differ by far more where weights are as uneven."""
_SMALL = 5e-2
"""Gradients are compared with this part of the largest at least: some are zero but for rounding (of keys' biases)."""

Styles = Sequence[tuple[str, Style]]
"""Names of modules within a block, each with its style."""
_Gap = tuple[float, str]
"""The norm of a difference, relative to that of the whole result, and which result it is."""


def without_activations(tensor: torch.Tensor) -> torch.Tensor:
    """Of an argument of a block what a trial needs: ids, masks and tables themselves, of activations the shape."""
    return torch.empty_like(tensor, device="meta") if tensor.requires_grad else tensor.detach()


def compare(meta: nn.Module, live: nn.Module, call: Any, styles: Styles, axis: TensorAxis) -> _Gap | str:
    """How far a sharded block is from the whole one; or why that cannot be found out. All ranks of the group together.

    Everything is computed in evaluation, in fp32 (fp64 stays), with whole sequences. Random numbers and the block
    itself stay as they are.

    Args:
        meta: the block, whole and without memory.
        live: where its buffers come from.
        call: its positional and named arguments, through `without_activations`.
        styles: how it is sharded.
    """
    device, precision = axis.device, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            axis.settle()
            return _compare(meta, live, call, styles, axis)
    finally:
        axis.settle()
        torch.set_float32_matmul_precision(precision)


def _compare(meta: nn.Module, live: nn.Module, call: Any, styles: Styles, axis: TensorAxis) -> _Gap | str:
    problem = ""
    try:
        block = _with_random_weights(meta, live, axis.device)
        sharded, splits = _shard(block, styles, axis)
        before = _random_state(axis.device)
        whole = _Run(block, call, axis.device)
        if not torch.equal(before, _random_state(axis.device)):
            problem = "it draws random numbers in evaluation, too"
        whole.backward([whole.random(output) for output in whole.outputs])
    except Exception as error:  # whatever the block does
        problem = f"computing it by itself failed: {type(error).__name__}: {error}".partition("\n")[0]
    problem = next((p for p in gather_objects(problem, axis.group) if p), "")  # before collectives of the block's
    if problem:
        return problem
    try:
        run = _Run(sharded, call, axis.device)
        if len(run.outputs) != len(whole.outputs):
            return 1.0, "the number of its outputs"
        expected, output_grads = [], []
        for mine, output, grad in zip(run.outputs, whole.outputs, whole.output_grads, strict=True):
            if not _is_part(mine, output, axis.size):
                return 1.0, f"its output, of shape {tuple(mine.shape)} in place of {tuple(output.shape)},"
            expected.append(_part(output, mine, axis))
            output_grads.append(_part(grad, mine, axis))
        run.backward(output_grads)
    except Exception as error:
        return f"computing it sharded failed: {type(error).__name__}: {error}".partition("\n")[0]
    furthest = _furthest([("its output", *pair) for pair in zip(expected, run.outputs, strict=True)])
    if furthest[0] > TOLERANCE:
        return furthest
    pairs = [("the gradient of its input", a.grad, b.grad) for a, b in zip(whole.leaves, run.leaves, strict=True)]
    for (name, a), b in zip(block.named_parameters(), sharded.parameters(), strict=True):
        if b in splits:  # whole ones may have partial gradients, which are compared elsewhere
            cut = None if a.grad is None else splits[b].cut(a.grad, axis.rank, axis.size)
            pairs.append((f"the gradient of {name}", cut, b.grad))
    return _furthest(pairs)


class _Run:
    """One forward of a block.

    Attributes:
        leaves: its inputs that get gradients: random ones.
        outputs: the tensors that it returned, of floating-point numbers.
        output_grads: what backward began with.
    """

    def __init__(self, block: nn.Module, call: Any, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(2)  # the same for all runs, on all ranks
        self.leaves: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.output_grads: list[torch.Tensor] = []
        args, kwargs = map_tensors(self._input, call)
        map_tensors(self._output, block(*args, **kwargs))

    def backward(self, output_grads: list[torch.Tensor]) -> None:
        self.output_grads = output_grads
        pairs = [(o, g) for o, g in zip(self.outputs, output_grads, strict=True) if o.requires_grad]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        self.outputs = [output.detach() for output in self.outputs]

    def random(self, like: torch.Tensor) -> torch.Tensor:
        dtype, device = torch.promote_types(like.dtype, torch.float32), self._generator.device
        return torch.randn(like.shape, generator=self._generator, dtype=dtype, device=device).to(_wide(like))

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(_wide(tensor), copy=True)
        leaf = self.random(tensor).requires_grad_()
        self.leaves.append(leaf)
        return leaf.clone()  # it may be changed in place

    def _output(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            self.outputs.append(tensor)
        return tensor


def _with_random_weights(meta: nn.Module, live: nn.Module, device: torch.device) -> nn.Module:
    """A whole block in evaluation, with buffers and other tensors of the one that trains."""
    block = copy.deepcopy(meta).to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(1)
    for param in block.parameters():
        if param.is_floating_point():
            param.data = _random_weight(param, generator)
    sources = dict(live.named_modules())
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


def _shard(block: nn.Module, styles: Styles, axis: TensorAxis) -> tuple[nn.Module, dict[nn.Parameter, Split]]:
    """A copy of `block` that is sharded as the model is, and how its parameters were split."""
    sharded = copy.deepcopy(block)
    splits: dict[nn.Parameter, Split] = {}
    along = (Region, SequenceBegin, SequenceEnd)
    modules = [(sharded.get_submodule(name), style) for name, style in styles if not isinstance(style, along)]
    for module, style in modules:
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        splits |= {own[name]: split for name, split in style.splits(module).items()}
    for param, split in splits.items():
        param.data = split.cut(param.data, axis.rank, axis.size)
    for module, style in modules:
        style.install(module, axis, False)
    return sharded, splits


def _is_part(mine: torch.Tensor, whole: torch.Tensor, size: int) -> bool:
    """Whether it has the same shape, or is 1 / `size` of one dim (attention weights that a block returns, too)."""
    other = [(n, m) for n, m in zip(whole.shape, mine.shape, strict=False) if n != m]
    return mine.dim() == whole.dim() and (not other or (len(other) == 1 and other[0][0] == size * other[0][1]))


def _part(whole: torch.Tensor, like: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """`whole`, or this rank's part of it where `like` has the shape of one."""
    dim = next((dim for dim, n in enumerate(like.shape) if n != whole.shape[dim]), None)
    return whole if dim is None else whole.chunk(axis.size, dim)[axis.rank]


def _furthest(results: Sequence[tuple[str, torch.Tensor | None, torch.Tensor | None]]) -> _Gap:
    """Of results with their values, whole and sharded, the one that is furthest off. No gradient is a gradient of 0."""
    pairs = [(what, *_finite(a, b)) for what, a, b in results if a is not None or b is not None]
    norms = [float(torch.linalg.vector_norm(a)) for _, a, _ in pairs]
    least = max(_SMALL * max(norms, default=0.0), 1e-30)
    apart = [float(torch.linalg.vector_norm(b - a)) for _, a, b in pairs]
    found = [(gap / max(norm, least), what) for (what, *_), norm, gap in zip(pairs, norms, apart, strict=True)]
    return max(found, default=(0.0, ""))


def _finite(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, with zeros where the first is not finite."""
    like = a if a is not None else b
    assert like is not None
    a, b = (torch.zeros_like(like) if value is None else value for value in (a, b))
    left_out = ~a.isfinite()
    return a.masked_fill(left_out, 0), b.masked_fill(left_out, 0).nan_to_num()


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """fp32 for what is narrower."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
