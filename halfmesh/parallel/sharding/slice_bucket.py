"""Parameters that are split into one chunk per data rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...utils.param_shard import ParamShard, set_grad
from ...utils.tensors import in_memory_order
from ...utils.torch_private import all_gather, foreach_copy_, reduce_scatter
from ..buckets import Bucket, give_grads
from .withheld import SCATTERED, WithheldGradient


class SliceBucket(Bucket):
    """Parameters whose elements, in memory order, are split into one chunk per data rank.

    A rank steps all of some parameters, a slice of at most two, and nothing of the others. It holds a slice of each,
    often an empty one, so that the optimizer's groups are equal on all ranks.

    Attributes:
        parts: the slices of `shards`, in the same order, that this rank steps.
        chunk: elements of a chunk.
    """

    def __init__(self, shards: list[ParamShard], dtype: torch.dtype, rank: int, size: int) -> None:
        super().__init__(shards, dtype)
        self.chunk = -(-self.numel // size)
        self._size = size
        self._received: torch.Tensor | None = None
        self._withheld: list[WithheldGradient] = []
        self.parts: list[ParamShard] = []
        offset = -rank * self.chunk
        for shard in shards:
            numel = shard.param.numel()
            start, stop = (min(max(edge, 0), numel) for edge in (-offset, self.chunk - offset))
            offset += numel
            memory = in_memory_order(shard.param.data)[start:stop]  # `.data`: writes are counted separately
            param = nn.Parameter(memory, requires_grad=shard.param.requires_grad)
            self.parts.append(ParamShard(shard.name, param, shard.weight * size, source=shard, start=start))

    def reset(self) -> None:
        super().reset()
        self._received = None

    def scatter(self, group: dist.ProcessGroup, divisor: int) -> dist.Work:
        """Start a reduce-scatter of the gradients / `divisor` to the ranks that step them."""
        flat = torch.empty(self.chunk * self._size, dtype=self.dtype, device=self.shards[0].param.device)
        self.absent = self._move_to(flat)
        if len(flat) > self.numel:
            flat[self.numel :].zero_()
        if divisor != 1:
            flat.div_(divisor)  # before the sum, which could overflow in half precision
        self._received = torch.empty(self.chunk, dtype=self.dtype, device=flat.device)
        work = reduce_scatter(self._received, flat, group=group, async_op=True)
        self.is_sent = True
        assert work is not None
        return work

    def assign_grads(self, unused: Collection[int]) -> None:
        """Add the reduced chunk to the gradients of `parts`; `unused`: shards without a gradient on any rank."""
        assert self._received is not None
        views = enumerate(zip(self.parts, self.split(self._received), strict=True))
        given = [(part.param, view) for index, (part, view) in views if index not in unused]
        held = [(param.grad, view) for param, view in given if param.grad is not None]
        give_grads([(param, view) for param, view in given if param.grad is None])
        if held:  # of a backward before, whose gradients were reduced already
            torch._foreach_add_([grad for grad, _ in held], [view for _, view in held])
        self._received = None

    def withhold(self) -> None:
        """Put placeholders in `param.grad` of the model's parameters, whose gradients are now in `parts`."""
        self._withheld = self._withheld or [WithheldGradient.of(s.param, s.name, SCATTERED) for s in self.shards]
        for shard, part, grad in zip(self.shards, self.parts, self._withheld, strict=True):
            if part.param.grad is not None:
                set_grad(shard.param, grad)

    def split(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """This rank's chunk, split into `parts`."""
        sizes = [part.param.numel() for part in self.parts]
        return list(chunk[: sum(sizes)].split(sizes))

    def gather(self, values: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
        """Start an all-gather of `values`, of one dtype, one for each of `parts`. `views` splits the result."""
        own = torch.empty(self.chunk, dtype=values[0].dtype, device=values[0].device)
        foreach_copy_(self.split(own), values)
        numel = sum(value.numel() for value in values)
        if numel < self.chunk:
            own[numel:].zero_()
        flat = torch.empty(self.chunk * self._size, dtype=own.dtype, device=own.device)
        work = all_gather(flat, own, group=group, async_op=True)
        assert work is not None
        return work, flat
