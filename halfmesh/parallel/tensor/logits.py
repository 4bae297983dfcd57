"""Logits that are sharded over the vocabulary, and their cross entropy."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...errors import InputError
from .. import collectives

_T = torch.Tensor
_ELEMENTWISE = {_T.to, _T.float, _T.double, _T.half, _T.bfloat16, _T.contiguous, _T.detach, _T.clone}
_ELEMENTWISE |= {_T.mul, _T.div, _T.tanh, torch.mul, torch.div, torch.tanh}
_RESHAPE = {_T.view, _T.reshape, _T.flatten, torch.flatten}
_OF_ANY_SHARD = {_T.dim, _T.is_floating_point, _T.is_complex, _T.element_size, _T.register_hook, _T.retain_grad}
_READ = {"T", "mT", "H", "mH", "data", "real", "imag"}  # these properties read elements


class ShardedLogits(torch.Tensor):
    """This rank's shard of logits [..., vocabulary]; `shape` is that of all logits.

    `F.cross_entropy` takes it as [tokens, vocabulary], and gives the loss of all logits. It may be cast, multiplied by
    numbers, and reshaped and indexed along other dims. What else reads logits raises InputError.
    """

    _local: torch.Tensor
    _group: dist.ProcessGroup

    @staticmethod
    def of(local: torch.Tensor, group: dist.ProcessGroup) -> ShardedLogits:
        """The logits of which `local` is this rank's shard."""
        logits = local.as_subclass(ShardedLogits)
        logits._local, logits._group = local, group
        return logits

    def to_local(self) -> torch.Tensor:
        """This rank's shard."""
        return self._local

    def full_tensor(self) -> torch.Tensor:
        """All logits. All ranks of the tensor group must call this together."""
        return collectives.gather(self._local, -1, self._group)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedLogits(shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        logits, *others = args
        if not isinstance(logits, ShardedLogits):
            raise _rejection(func)
        local = logits._local
        whole = torch.empty((*local.shape[:-1], local.shape[-1] * logits._group.size()), device="meta")
        name = getattr(getattr(func, "__self__", None), "__name__", "")  # of a property
        if name == "shape" or func in (_T.size, _T.numel):
            return func(whole, *others, **kwargs)
        if func in _OF_ANY_SHARD or (name and func.__name__ == "__get__" and name not in _READ):
            return func(local, *others, **kwargs)
        if func in _RESHAPE:
            *shape, entries = func(whole, *others, **kwargs).shape
            if entries == whole.shape[-1]:
                return ShardedLogits.of(local.reshape(*shape, local.shape[-1]), logits._group)
        is_elementwise = func in _ELEMENTWISE and not any(isinstance(x, _T) for x in (*others, *kwargs.values()))
        if is_elementwise or (func is _T.__getitem__ and _keeps_last_dim(others[0], local.dim())):
            return ShardedLogits.of(func(local, *others, **kwargs), logits._group)
        raise _rejection(func)


def _keeps_last_dim(index: Any, dims: int) -> bool:
    """Return True if a tensor's element `[index]` has all of its last dim."""
    index = index if isinstance(index, tuple) else (index,)
    masks = [i for i in index if isinstance(i, torch.Tensor) and i.dtype == torch.bool]
    indexed = sum(i is not None and i is not Ellipsis for i in index) + sum(mask.dim() - 1 for mask in masks)
    if indexed == dims or any(i is Ellipsis for i in index[:-1]):
        return isinstance(index[-1], slice) and index[-1] == slice(None)
    return indexed < dims


def local_ids(ids: torch.Tensor, entries: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """`ids` as places among this rank's `entries` of a vocabulary: 0 for those of other ranks; and which these are.

    Ids that no rank has stay out of range, and fail on all ranks as in one process."""
    local = ids - group.rank() * entries
    elsewhere = (ids >= 0) & (ids < entries * group.size()) & ((local < 0) | (local >= entries))
    return local.masked_fill(elsewhere, 0), elsewhere


def _rejection(func: Any) -> InputError:
    return InputError(
        f"{getattr(func, '__name__', func)}() needs all logits, but each rank has a shard (style 'vocab_parallel'); "
        "use F.cross_entropy with logits [tokens, vocabulary], logits.full_tensor(), or the style 'colwise_gather'"
    )


def _cross_entropy(
    input: Any, target: torch.Tensor, *, ignore_index: int, reduction: str, label_smoothing: float, **more: Any
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of sharded logits, in fp32 or more."""
    if given := [name for name, value in more.items() if value is not None]:
        raise InputError(f"cross_entropy of sharded logits takes no {given[0]}")
    if target.shape != input.shape[:-1] or input.dim() > 2 or target.is_floating_point():
        shapes = f"{list(input.shape)} and {list(target.shape)} ({target.dtype})"
        raise InputError(f"cross_entropy of sharded logits takes [tokens, vocabulary] and ids [tokens], not {shapes}")
    is_ignored = target == ignore_index
    losses = _CrossEntropy.apply(input._local, target.masked_fill(is_ignored, 0), input._group, label_smoothing)
    losses = losses.masked_fill(is_ignored, 0.0)
    if reduction == "mean":
        return losses.sum() / (~is_ignored).sum()
    return losses.sum() if reduction == "sum" else losses


class _CrossEntropy(Function):
    """The loss of each token. Ranks send three numbers of each, or four with label smoothing."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup, smoothing: float
    ) -> torch.Tensor:
        entries, wide = logits.shape[-1], logits.to(torch.promote_types(logits.dtype, torch.float32))
        index, elsewhere = local_ids(target, entries, group)
        index = index.unsqueeze(-1)
        log_sum = wide.logsumexp(-1)
        largest = log_sum.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        parts = [(log_sum - largest).exp(), wide.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0)]
        sums = torch.stack([*parts, wide.sum(-1)] if smoothing else parts)
        dist.all_reduce(sums, group=group)
        log_sum = largest + sums[0].log()
        ctx.save_for_backward(logits, log_sum, index, elsewhere)
        ctx.sure, ctx.other = 1 - smoothing, smoothing / (entries * group.size())
        losses = log_sum - ctx.sure * sums[1]
        return losses - ctx.other * sums[2] if smoothing else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, log_sum, index, elsewhere = ctx.saved_tensors
        found = logits.to(log_sum.dtype).sub(log_sum.unsqueeze(-1)).exp_().sub_(ctx.other)
        found.scatter_add_(-1, index, elsewhere.to(found.dtype).sub_(1).mul_(ctx.sure).unsqueeze(-1))
        return found.mul_(grad.unsqueeze(-1)).to(logits.dtype), None, None, None
