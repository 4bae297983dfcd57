"""Gradients that are sent together, in one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..utils.param_shard import ParamShard, clear_grads, set_grad
from ..utils.tensors import is_dense
from ..utils.torch_private import foreach_copy_


class Bucket:
    """Shards whose gradients are sent in one flat tensor: all gradients, then one flag per shard.

    A flag is nonzero if some rank had a gradient; it is read only by ranks that had none.

    Attributes:
        missing: ids of the shards whose gradients have not arrived yet.
        absent: indices of the shards that had no gradient on this rank.
    """

    def __init__(self, shards: list[ParamShard], dtype: torch.dtype) -> None:
        self.shards = shards
        self.dtype = dtype
        self.reset()

    def reset(self) -> None:
        self.missing = {id(shard) for shard in self.shards if shard.param.requires_grad}
        self.flat: torch.Tensor | None = None
        self.is_sent = False
        self.absent: list[int] = []

    @property
    def numel(self) -> int:
        """Elements of all shards."""
        return sum(shard.param.numel() for shard in self.shards)

    def pack(self) -> torch.Tensor:
        """Move the gradients into a new flat tensor."""
        numel = self.numel
        self.flat = torch.empty(numel + len(self.shards), dtype=self.dtype, device=self.shards[0].param.device)
        self.absent = self._move_to(self.flat)
        self.flat[numel:].fill_(1)
        for index in self.absent:
            self.flat[numel + index] = 0
        self.is_sent = True
        return self.flat

    def _move_to(self, flat: torch.Tensor) -> list[int]:
        """Move the gradients into the beginning of `flat`, zeros for missing ones. Returns the indices of these."""
        grads = [shard.param.grad for shard in self.shards]
        absent: list[int] = []
        present: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, (shard, grad, view) in enumerate(zip(self.shards, grads, self.views(flat), strict=True)):
            if grad is None:
                absent.append(index)
                view.zero_()
            elif grad.layout != torch.strided:
                raise InputError(
                    f"the gradient of {shard.name!r} is sparse ({grad.layout}), which data parallelism does not "
                    "support; build its layer with sparse=False"
                )
            else:
                present.append((view, grad))
        clear_grads([shard.param for shard in self.shards])
        if present:
            foreach_copy_(*zip(*present, strict=True))
        return absent

    def unpack(self) -> None:
        """Set each shard's gradient from the reduced flat tensor, as a view where the dtype allows."""
        assert self.flat is not None
        flags = self.flat[-len(self.shards) :].tolist() if self.absent else []
        unused = {index for index in self.absent if flags[index] == 0}
        views = enumerate(zip(self.shards, self.views(self.flat), strict=True))
        give_grads([(shard.param, view) for index, (shard, view) in views if index not in unused])

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each shard's slice of `flat`, with its parameter's strides: fused optimizers need equal ones."""
        views, offset = [], 0
        for shard in self.shards:
            param = shard.param
            stride = param.stride() if is_dense(param) else torch.empty(param.shape, device="meta").stride()
            views.append(flat.as_strided(param.shape, stride, offset))
            offset += param.numel()
        return views


def give_grads(given: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Set the reduced tensors as the parameters' gradients: in their own dtype, or that of a wider parameter."""
    narrow = []
    for param, grad in given:
        # bf16 and fp16 do not fit into each other either
        if grad.dtype == param.dtype or param.dtype.itemsize < torch.float32.itemsize:
            set_grad(param, grad)
        else:
            narrow.append((param, torch.empty_like(grad, dtype=param.dtype), grad))
    if narrow:
        params, wide, grads = zip(*narrow, strict=True)
        foreach_copy_(wide, grads)
        for param, grad in zip(params, wide, strict=True):
            set_grad(param, grad)


def reduce_dtype_of(param: nn.Parameter, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the gradient of `param` is reduced: `dtype`, or float64 for a float64 parameter."""
    return torch.float64 if param.dtype == torch.float64 else dtype


def group_shards(
    shards: Sequence[ParamShard], dtype: torch.dtype, size_limit: int, kind: Callable[[nn.Parameter], Any]
) -> list[list[ParamShard]]:
    """The shards of each bucket, in reverse order of the model, which is about the order in which gradients arrive.

    Args:
        dtype: in which gradients are reduced.
        size_limit: bytes of a bucket; a larger shard gets a separate one.
        kind: equal for parameters that may share a bucket.
    """
    groups: list[list[ParamShard]] = []
    open_groups: dict[Any, tuple[list[ParamShard], int]] = {}
    for shard in reversed(shards):
        key, size = kind(shard.param), shard.param.numel() * reduce_dtype_of(shard.param, dtype).itemsize
        group, room = open_groups.get(key, ([], -1))
        if size > room:
            group, room = [], size_limit
            groups.append(group)
        group.append(shard)
        open_groups[key] = group, room - size
    return groups


def make_buckets(shards: Sequence[ParamShard], dtype: torch.dtype, size_limit: int) -> list[Bucket]:
    """Buckets of one dtype and device each, see `group_shards`."""
    groups = group_shards(shards, dtype, size_limit, lambda p: (reduce_dtype_of(p, dtype), p.device))
    return [Bucket(group, reduce_dtype_of(group[0].param, dtype)) for group in groups]
