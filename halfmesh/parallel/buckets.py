"""Gradients that travel together, in one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import torch_private
from ..errors import InputError
from ..shard import ParamShard
from ..strides import is_dense


class Bucket:
    """Some shards whose gradients travel in one flat tensor: all gradients, then one flag per shard.

    A flag is nonzero if some rank had a gradient; it is read only by ranks that had none.

    Where it has the parameters' dtype, gradients are parts of it: backward adds them up there, nothing is copied, and
    the memory is kept from update to update. Otherwise they are copied into a new one.
    """

    def __init__(self, shards: list[ParamShard], dtype: torch.dtype, is_view: bool) -> None:
        self.shards = shards
        self.dtype = dtype
        self.is_view = is_view
        """Whether gradients are parts of the flat tensor."""
        self.missing: set[int] = set()
        """Shards whose gradients are to come yet, by id."""
        self.sent = False
        self.blank: set[int] = set()
        """Shards that were given zeros to add to, and no gradient since, by id."""
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._absent: list[int] = []

    def reset(self, keeps: bool = True) -> None:
        """Begin anew; without `keeps` in other memory, because the old one is still under way."""
        self.missing = {id(shard) for shard in self.shards if shard.param.requires_grad}
        self.sent = False
        self._absent = []
        if not (self.is_view and keeps):
            self._flat, self._views = None, []
            self.blank.clear()

    def attach(self) -> None:
        """Before a backward: parameters without a gradient get zeros to add to."""
        if not self.is_view:
            return
        empty = [i for i, s in enumerate(self.shards) if s.param.grad is None and s.main_grad is None]
        if not empty:
            return
        if self._flat is None:
            self._make_flat()
        assert self._flat is not None
        if len(empty) == len(self.shards):
            self._flat.zero_()
        else:
            for index in empty:
                self._views[index].zero_()
        for index in empty:
            shard = self.shards[index]
            if shard.param.requires_grad:
                shard.param.grad = self._views[index]
                self.blank.add(id(shard))

    def detach(self) -> None:
        """Parameters that got no gradient have none again."""
        if self.blank:
            for shard, view in zip(self.shards, self._views, strict=True):
                if id(shard) in self.blank and shard.param.grad is view:
                    shard.param.grad = None
            self.blank.clear()

    def pack(self) -> torch.Tensor:
        """All gradients in one flat tensor."""
        self.detach()
        grads = [shard.take_grad() for shard in self.shards]
        if self._flat is None:
            self._make_flat()
        assert self._flat is not None
        flags = self._flat[-len(self.shards) :].fill_(1)
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, (shard, grad, view) in enumerate(zip(self.shards, grads, self._views, strict=True)):
            if grad is None:
                self._absent.append(index)
                view.zero_()
                flags[index] = 0
            elif grad.layout != torch.strided:
                raise InputError(
                    f"the gradient of {shard.name!r} is sparse ({grad.layout}), which data parallelism does not "
                    "support; build its layer with sparse=False"
                )
            elif grad is not view:
                copied.append((view, grad))
                shard.clear_grad()
        if copied:
            torch_private.foreach_copy_(*zip(*copied, strict=True))
        self.sent = True
        return self._flat

    def unpack(self) -> None:
        """Give each shard its part of the reduced flat tensor, as a view where the dtype allows."""
        assert self._flat is not None
        flags = self._flat[-len(self.shards) :].tolist() if self._absent else []
        for index, (shard, view) in enumerate(zip(self.shards, self._views, strict=True)):
            if index in self._absent and flags[index] == 0:
                continue
            half = shard.param.dtype.itemsize < torch.float32.itemsize
            if half and self.dtype != shard.param.dtype:  # bf16 and fp16 do not fit into each other either
                shard.main_grad = view
            elif shard.main_grad is not view:
                shard.param.grad = view.to(shard.param.dtype)

    def _make_flat(self) -> None:
        """A flat tensor, and each shard's part of it with its parameter's strides: fused optimizers need both alike."""
        numel = sum(shard.param.numel() for shard in self.shards)
        self._flat = torch.empty(numel + len(self.shards), dtype=self.dtype, device=self.shards[0].param.device)
        self._views, offset = [], 0
        for shard in self.shards:
            param = shard.param
            stride = param.stride() if is_dense(param) else torch.empty(param.shape, device="meta").stride()
            self._views.append(self._flat.as_strided(param.shape, stride, offset))
            offset += param.numel()


def make_buckets(
    shards: Sequence[ParamShard], reduce_dtype: torch.dtype, size_limit: int, wide_sums: bool = False
) -> list[Bucket]:
    """Buckets in reverse order of the model, which is about the order in which gradients arrive.

    Args:
        size_limit: of a bucket, in bytes; one larger parameter stands alone.
        wide_sums: half-precision gradients are added up elsewhere, in `main_grad`.
    """
    buckets: list[Bucket] = []
    room = 0
    for shard in reversed(shards):
        own = shard.param.dtype
        dtype = torch.float64 if own == torch.float64 else reduce_dtype
        is_view = own == dtype and not (wide_sums and own.itemsize < torch.float32.itemsize)
        size = shard.param.numel() * dtype.itemsize
        if not buckets or size > room or (dtype, is_view) != (buckets[-1].dtype, buckets[-1].is_view):
            buckets.append(Bucket([], dtype, is_view))
            room = size_limit
        buckets[-1].shards.append(shard)
        room -= size
    return buckets
