"""Collectives over the ranks of an axis that autograd can differentiate.

An activation, or its gradient, is "replicated", the same on every rank; "sharded", each rank's shard of it; or
"partial", to be summed over the ranks.

| function | forward | backward |
|---|---|---|
| `reduce_from_tp` | partial -> replicated, summed | the gradient as it is |
| `split` | replicated -> this rank's shard | shards are gathered |
| `gather` | sharded -> replicated | this rank's shard (all ranks compute the same, and have the same gradient) |
| `all_gather_sequence` | sharded -> replicated | partial gradients are summed, each rank keeps its shard |
| `reduce_scatter_sequence` | partial -> summed, this rank's shard | shards are gathered |
| `average` | partial -> replicated, averaged | the gradient times a factor |
| `scale_gradient` | as it is | the gradient times a factor |
| `exchange` | sharded along one dim -> sharded along another | the reverse |
| `send_rows` | rows in order of the rank that they are for -> those for this rank | the reverse |

Tensors without memory (`shapes_only`) are not sent. torch.compile breaks its graph at each
of these.

(The pairs of Megatron-LM, https://arxiv.org/abs/1909.08053 section 3 and https://arxiv.org/abs/2205.05198 section 4.2.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..utils.torch_private import all_gather, reduce_scatter


@torch.compiler.disable
def reduce_from_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `x` over the ranks, in place: nothing else may use `x`."""
    return _Reduce.apply(x, group)


@torch.compiler.disable
def split(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's shard of `x` along `dim`, whose size the number of ranks must divide."""
    return connect(x, lambda x: _shard(x, dim, group), lambda grad: start_gather(grad, dim, group)())


@torch.compiler.disable
def gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The ranks' `x` concatenated along `dim`, for computations that are the same on all ranks."""
    return connect(x, lambda x: start_gather(x, dim, group)(), lambda grad: _shard(grad, dim, group))


@torch.compiler.disable
def all_gather_sequence(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The ranks' `x` concatenated along `dim`, for layers that each give a partial gradient."""
    return connect(x, lambda x: start_gather(x, dim, group)(), lambda grad: start_sum_shard(grad, dim, group)())


@torch.compiler.disable
def reduce_scatter_sequence(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's shard along `dim` of the sum of `x` over the ranks."""
    return connect(x, lambda x: start_sum_shard(x, dim, group)(), lambda grad: start_gather(grad, dim, group)())


@torch.compiler.disable
def average(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean of the ranks' `part`, a loss of this rank's tokens. Its gradient is that of `part`: gradients of weights
    are averaged over the ranks afterwards."""
    return connect(part, lambda x: start_sum(x, group)() / group.size(), lambda grad: grad)


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """`x`, whose gradient is multiplied by `factor`."""
    return connect(x, lambda x: x.view_as(x), lambda grad: grad * factor)


@torch.compiler.disable
def exchange(x: torch.Tensor, whole: int, sharded: int, group: dist.ProcessGroup) -> torch.Tensor:
    """From this rank's shard along dim `sharded` to its shard along dim `whole`: one all-to-all. The number of ranks
    must divide the size of `whole`."""
    return connect(
        x, lambda x: _exchanged(x, whole, sharded, group), lambda grad: _exchanged(grad, sharded, whole, group)
    )


@torch.compiler.disable
def send_rows(x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The rows (dim 0) that the ranks have for this one, in order of rank: one all-to-all.

    Args:
        sent: the number of rows of `x`, in order of rank, for each rank.
        received: the number of rows that each rank sends to this one.
    """
    return connect(x, lambda x: _sent(x, sent, received, group), lambda grad: _sent(grad, received, sent, group))


_Step = Callable[[torch.Tensor], torch.Tensor]
_Backward = Callable[..., torch.Tensor]
Wait = Callable[[], torch.Tensor]
"""Waits for a collective in flight, and returns its result."""


class _Collective(Function):
    """Applies `forward` to a tensor, and `backward` to its gradient and the tensors in `kept`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: _Step, backward: _Backward, kept: Any = ()) -> torch.Tensor:
        ctx.step = backward
        ctx.save_for_backward(*kept)
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.step(grad, *ctx.saved_tensors), None, None, None


connect: Callable[..., torch.Tensor] = _Collective.apply


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # Selective checkpointing, a dispatch mode, keeps the product itself.
        if not x.is_contiguous() or _get_current_dispatch_mode() is not None:
            return start_sum(x, group)()
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def start_sum(x: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start the sum of `x` over the ranks."""
    total = x.clone(memory_format=torch.contiguous_format)
    return partial(_wait, dist.all_reduce(total, group=group, async_op=True), total)


def _wait(work: Any, result: torch.Tensor, *_sent: torch.Tensor) -> torch.Tensor:
    if work is not None:  # tensors without memory are not sent
        work.wait()
    return result


def _shard(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def start_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> Wait:
    """Start to concatenate the ranks' `x` along `dim`."""
    dim %= x.dim()
    shards, sent = x.new_empty((group.size(), *x.shape)), x.contiguous()
    work = all_gather(shards.flatten(0, 1), sent, group=group, async_op=True)  # along dim 0
    return lambda: _wait(work, shards, sent).movedim(0, dim).flatten(dim, dim + 1)


def start_sum_shard(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> Wait:
    """Start the sum of `x` over the ranks, of which this one gets its shard along `dim`."""
    dim %= x.dim()
    shards = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(shards[0])
    return partial(_wait, reduce_scatter(mine, shards.flatten(0, 1), group=group, async_op=True), mine, shards)


def _exchanged(x: torch.Tensor, whole: int, sharded: int, group: dist.ProcessGroup) -> torch.Tensor:
    sent = x.unflatten(whole, (group.size(), -1)).movedim(whole, 0).contiguous()  # [rank, ...]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, sharded).flatten(sharded, sharded + 1)


def _sent(x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    rows = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(rows, x.contiguous(), received, sent, group=group)
    return rows
