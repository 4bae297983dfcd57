"""Collectives over the tensor axis that autograd can go backward through.

Written for activations of which either every rank has the same ("whole") or each rank has its part ("divided"). Between
two layers that divide their features, a "partial" activation or gradient is one that has to be summed over the ranks.

| function | forward | backward |
|---|---|---|
| `copy_in` | whole -> whole | partial gradients are summed |
| `sum_out` | partial -> whole, summed | as it is |
| `split` | whole -> this rank's part | parts are gathered |
| `gather` | parts -> whole | this rank's part (all ranks go on alike, with the same gradient) |
| `gather_in` | parts -> whole | partial gradients are summed, each rank keeps its part |
| `sum_and_split` | partial -> summed, this rank's part | parts are gathered |

Where tensors have no memory (halfmesh.parallel.pipeline.shape_inference), nothing is sent. Compiled code ends
before each of them and goes on after it.

(The pairs of Megatron-LM, https://arxiv.org/abs/1909.08053 section 3 and https://arxiv.org/abs/2205.05198 section 4.2.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..._torch import in_shapes_only


@torch.compiler.disable
def copy_in(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`x`, used by layers each of which gives its part of the gradient."""
    return _CopyIn.apply(x, group)


@torch.compiler.disable
def sum_out(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `x` over the ranks. Uses up `x`, which nobody else may hold: it is summed in place."""
    return _SumOut.apply(x, group)


@torch.compiler.disable
def split(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of `x` along `dim`, whose size the ranks have to divide."""
    return _Split.apply(x, dim % x.dim(), group)


@torch.compiler.disable
def gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of the parts `x` along `dim`, for computations that are the same on all ranks."""
    return _Gather.apply(x, dim % x.dim(), group)


@torch.compiler.disable
def gather_in(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of the parts `x` along `dim`, used by layers each of which gives its part of the gradient."""
    return _GatherIn.apply(x, dim % x.dim(), group)


@torch.compiler.disable
def sum_and_split(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part along `dim` of the sum of `x` over the ranks."""
    return _SumAndSplit.apply(x, dim % x.dim(), group)


class _CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


class _SumOut(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if (
            not x.is_contiguous() or _get_current_dispatch_mode() is not None
        ):  # selective checkpointing keeps the product itself
            return _summed(x, group)
        ctx.mark_dirty(x)
        if not in_shapes_only():
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _part(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(grad, ctx.dim, ctx.group), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _part(grad, ctx.dim, ctx.group), None, None


class _GatherIn(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _summed_part(grad, ctx.dim, ctx.group), None, None


class _SumAndSplit(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _summed_part(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(grad, ctx.dim, ctx.group), None, None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # others may hold `x`, which a sum in place would change
    if not in_shapes_only():
        dist.all_reduce(total, group=group)
    return total


def _part(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _gathered(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    size = group.size()
    # The collective joins along dim 0, so the ranks' parts come one after another: [size, ...].
    parts = x.new_empty((size * x.shape[0], *x.shape[1:])) if dim == 0 else x.new_empty((size, *x.shape))
    if not in_shapes_only():
        dist.all_gather_into_tensor(parts.view(size * x.shape[0], *x.shape[1:]), x.contiguous(), group=group)
    return parts if dim == 0 else parts.movedim(0, dim).flatten(dim, dim + 1)


def _summed_part(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    size = group.size()
    parts = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(parts[0])
    if not in_shapes_only():
        dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=group)
    return mine
