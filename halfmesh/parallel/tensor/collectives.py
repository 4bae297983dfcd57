"""Collectives over the tensor axis that autograd can go backward through.

Written for activations of which either every rank has the same ("whole") or each rank has its part ("divided"). Between
two layers that divide their features, a "partial" activation or gradient is one that has to be summed over the ranks.

| function | forward | backward |
|---|---|---|
| `copy_to_tp` | whole -> whole | partial gradients are summed |
| `reduce_from_tp` | partial -> whole, summed | as it is |
| `split` | whole -> this rank's part | parts are gathered |
| `gather` | parts -> whole | this rank's part (all ranks go on alike, with the same gradient) |
| `all_gather_sequence` | parts -> whole | partial gradients are summed, each rank keeps its part |
| `reduce_scatter_sequence` | partial -> summed, this rank's part | parts are gathered |

Where tensors have no memory (halfmesh.parallel.pipeline.shape_inference), nothing is sent. Compiled code ends
before each of them and goes on after it.

(The pairs of Megatron-LM, https://arxiv.org/abs/1909.08053 section 3 and https://arxiv.org/abs/2205.05198 section 4.2.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..._torch import in_shapes_only


@torch.compiler.disable
def copy_to_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`x`, used by layers each of which gives its part of the gradient."""
    return _Collective.apply(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


@torch.compiler.disable
def reduce_from_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `x` over the ranks. Uses up `x`, which nobody else may hold: it is summed in place."""
    return _Reduce.apply(x, group)


@torch.compiler.disable
def split(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of `x` along `dim`, whose size the ranks have to divide."""
    dim %= x.dim()
    return _Collective.apply(x, lambda x: _part(x, dim, group), lambda grad: _gathered(grad, dim, group))


@torch.compiler.disable
def gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of the parts `x` along `dim`, for computations that are the same on all ranks."""
    dim %= x.dim()
    return _Collective.apply(x, lambda x: _gathered(x, dim, group), lambda grad: _part(grad, dim, group))


@torch.compiler.disable
def all_gather_sequence(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of the parts `x` along `dim`, used by layers each of which gives its part of the gradient."""
    dim %= x.dim()
    return _Collective.apply(x, lambda x: _gathered(x, dim, group), lambda grad: _summed_part(grad, dim, group))


@torch.compiler.disable
def reduce_scatter_sequence(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part along `dim` of the sum of `x` over the ranks."""
    dim %= x.dim()
    return _Collective.apply(x, lambda x: _summed_part(x, dim, group), lambda grad: _gathered(grad, dim, group))


_Step = Callable[[torch.Tensor], torch.Tensor]


class _Collective(Function):
    """What is done with a tensor, and in backward with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: _Step, backward: _Step) -> torch.Tensor:
        ctx.step = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.step(grad), None, None


class _Reduce(Function):
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
