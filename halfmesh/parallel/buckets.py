"""Collects gradients in flat buckets, each of which the ranks reduce with one collective."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..utils.param_shard import ParamShard, clear_grads, set_grad
from ..utils.torch_private import foreach_copy_, foreach_zero_

_B = TypeVar("_B", bound="Bucket")

ALIGNED = 8
"""Gradients begin at multiples of this many elements in a bucket: of 16 bytes also in half precision, for kernels that
read 16 bytes at once."""


@dataclass(frozen=True)
class ReduceOptions:
    """Options of the reduction. Defaults: fp32 sums, 25 MiB buckets (as torch DDP), 8 in flight (as SageMaker)."""

    INFLIGHT_BYTES: ClassVar[int] = 256 * 2**20
    """So many bytes may be in flight, or two buckets: under zero1 they are temporary memory."""

    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 25 * 2**20
    max_inflight: int = 8
    mean: bool = True
    """Average over the ranks of the reducer; False sums."""
    loss_parts: int = 1
    """The ranks that have parts of one loss: a sum is one of means over these."""

    def has_room(self, inflight: Collection[Bucket], more: Bucket) -> bool:
        """Return True if `more` may be sent before one of the buckets `inflight` has arrived."""
        held = sum(bucket.bytes for bucket in (*inflight, more))
        return len(inflight) < self.max_inflight and (len(inflight) < 2 or held <= self.INFLIGHT_BYTES)


class Bucket:
    """Shards whose gradients are sent in one flat tensor: all gradients, each with zeros up to the next multiple of
    `ALIGNED`, then one flag per shard.

    A flag is nonzero if some rank had a gradient; it is read only by ranks that had none.

    Attributes:
        group: the ranks over which the gradients are summed.
        numel: the number of elements of the flat tensor without flags.
        offsets: the index in the flat tensor at which the gradient of each shard begins.
        sent: the flat tensor, once it is sent.
        missing: the parameters whose gradients have not arrived yet.
        absent: indices of the shards that had no gradient on this rank.
    """

    def __init__(self, shards: list[ParamShard], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self.shards = shards
        self.group = group
        self.params = [shard.param for shard in shards]
        self.offsets = [0, *itertools.accumulate(round_up(param.numel()) for param in self.params)]
        self.numel = self.offsets.pop()
        self.dtype = dtype
        self._layout: tuple[list[Any], list[Any]] = [], []  # the parameters' strides, and those of their gradients
        self.reset()

    @property
    def bytes(self) -> int:
        """Of the gradients in the flat tensor."""
        return self.numel * self.dtype.itemsize

    def reset(self) -> None:
        self.missing = {param for param in self.params if param.requires_grad}
        self.sent: Any = None
        self._views: list[torch.Tensor] = []
        self.absent: list[int] = []

    def pack(self) -> torch.Tensor:
        """Move the gradients into a new flat tensor, for `start`."""
        flat, self._views = self._take_grads(self.numel + len(self.shards))
        self.sent = flat
        return flat

    def start(self, flat: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start to reduce it over the ranks. Returns what to `wait` for."""
        return all_reduce(flat, self.group, op)

    def _take_grads(self, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A new flat tensor that begins with the gradients, zeros for absent ones, and ends with flags; and views of
        the gradients."""
        flat = torch.empty(size, dtype=self.dtype, device=self.params[0].device)
        views = self.views(flat)
        self.absent, present = [], []
        for index, (param, view) in enumerate(zip(self.params, views, strict=True)):
            if param.grad is None:
                self.absent.append(index)
            else:
                present.append((view, param.grad))
        clear_grads(self.params)
        if present:
            foreach_copy_(*zip(*present, strict=True))
        ends = [offset + param.numel() for offset, param in zip(self.offsets, self.params, strict=True)]
        gaps = zip(ends, [*self.offsets[1:], self.numel], strict=True)
        zeros = [views[index] for index in self.absent] + [flat[end:next] for end, next in gaps if end < next]
        if size > self.numel:
            flat[self.numel :].fill_(1)
            zeros += [flat[self.numel + index] for index in self.absent]
        if zeros:
            foreach_zero_(zeros)
        return flat, views

    @property
    def flags(self) -> torch.Tensor:
        """Those of the reduced flat tensor."""
        return self.sent[self.numel :]

    def unpack(self, flags: Sequence[float] = ()) -> None:
        """Set each shard's gradient from the reduced flat tensor, as a view where the dtype allows.

        Args:
            flags: the values of `flags`; not needed if none is `absent`.
        """
        unused = {index for index in self.absent if flags[index] == 0}
        views = enumerate(zip(self.params, self._views, strict=True))
        give_grads([pair for index, pair in views if index not in unused])

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each shard's slice of `flat`, with its parameter's strides: fused optimizers need equal ones."""
        strides = [param.stride() for param in self.params]
        if strides != self._layout[0]:
            self._layout = strides, [torch.empty_like(param, device="meta").stride() for param in self.params]
        places = zip(self.params, self._layout[1], self.offsets, strict=True)
        return [flat.as_strided(param.shape, stride, offset) for param, stride, offset in places]


def round_up(numel: int, unit: int = ALIGNED) -> int:
    """The next multiple of `unit`."""
    return -(-numel // unit) * unit


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


def make_buckets(
    shards: Sequence[ParamShard],
    options: ReduceOptions,
    group_of: Callable[[nn.Parameter], dist.ProcessGroup],
    make: Callable[[list[ParamShard], torch.dtype, dist.ProcessGroup], _B],
    kind: Callable[[nn.Parameter], Any] = lambda param: None,
    room_for: Callable[[nn.Parameter], int] = lambda param: 0,
) -> list[_B]:
    """Buckets of one dtype, device and group each, in reverse order of the model: about the order in which gradients
    arrive. A shard of more than `options.bucket_bytes` gets a separate one.

    Args:
        group_of: the ranks over which the gradient of a parameter is summed.
        kind: equal for parameters that may share a bucket.
        room_for: bytes that a bucket with this parameter may have, if more than the options'.
    """
    made: list[tuple[list[ParamShard], torch.dtype, dist.ProcessGroup]] = []
    last: dict[Any, tuple[list[ParamShard], int]] = {}
    for shard in reversed(shards):
        param, group = shard.param, group_of(shard.param)
        dtype = torch.float64 if param.dtype == torch.float64 else options.dtype
        key, size = (dtype, param.device, group, kind(param)), param.numel() * dtype.itemsize
        held, room = last.get(key, ([], -1))
        if size > room:
            held, room = [], max(options.bucket_bytes, room_for(param))
            made.append((held, dtype, group))
        held.append(shard)
        last[key] = held, room - size
    return [make(*each) for each in made]


class NothingSent:
    """The work of a group of one rank."""

    def wait(self) -> None: ...


def all_reduce(flat: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Any:
    """Start to reduce `flat` over `group`, in place. Returns what to `wait` for."""
    return NothingSent() if group.size() == 1 else dist.all_reduce(flat, op, group=group, async_op=True)


def can_average(flat: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return True if the backend of `group` divides while it sums, which saves a pass over `flat`.

    NCCL multiplies each rank's values by 1 / ranks before it sums, so half precision does not overflow; but it rounds
    that factor to their dtype (NCCL's src/enqueue.cc), which in half precision is exact for powers of two only.
    """
    ranks = group.size()
    is_exact = flat.dtype.itemsize >= torch.float32.itemsize or ranks & (ranks - 1) == 0
    return flat.is_cuda and is_exact and "nccl" in dist.get_backend(group)


def read_together(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """The values of tensors of one dim; the host waits once for all."""
    values = iter(torch.cat([tensor.to(tensors[0].device) for tensor in tensors]).tolist() if tensors else ())
    return [list(itertools.islice(values, len(tensor))) for tensor in tensors]
