"""Reductions of gradients over ranks: in buckets, while backward still runs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InputError
from ..utils.param_shard import ParamShard, clear_grads, set_grad
from ..utils.torch_private import foreach_copy_, foreach_mul_, foreach_zero_

_B = TypeVar("_B", bound="Bucket")

Buffers = Mapping[str, torch.Tensor]
"""The buffers of a model, by name."""

ALIGNED = 8
"""Gradients begin at multiples of so many elements in a bucket: of 16 bytes also in half precision, for kernels that
read 16 bytes at once."""

STATISTICS = ("running_mean", "running_var")
"""Names of buffers that are averaged: those of BatchNorm and InstanceNorm, and of layers that use their names."""


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
        group: the ranks over which they are summed.
        numel: of the flat tensor without flags.
        offsets: where the gradient of each begins in the flat tensor.
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
        self.sent: torch.Tensor | None = None
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
        assert self.sent is not None
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


def reduce_dtype_of(param: nn.Parameter, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the gradient of `param` is reduced: `dtype`, or float64 for a float64 parameter."""
    return torch.float64 if param.dtype == torch.float64 else dtype


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
        param, dtype, group = shard.param, reduce_dtype_of(shard.param, options.dtype), group_of(shard.param)
        key, size = (dtype, param.device, group, kind(param)), param.numel() * dtype.itemsize
        held, room = last.get(key, ([], -1))
        if size > room:
            held, room = [], max(options.bucket_bytes, room_for(param))
            made.append((held, dtype, group))
        held.append(shard)
        last[key] = held, room - size
    return [make(*each) for each in made]


class Reduction:
    """Completes the gradients of one rank by those of other ranks: by `reductions`, one after the other; without
    any they are complete. The engine calls `open` before and `finish` after the backwards of an update, and `forget`
    after the update; all ranks together."""

    reductions: Sequence[Reduction] = ()

    def __init__(self, reductions: Sequence[Reduction] = ()) -> None:
        self.reductions = reductions

    @property
    def is_complete(self) -> bool:
        """True if `finish` need not be called: no gradient has arrived since it was."""
        return all(reduction.is_complete for reduction in self.reductions)

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        """These are trained from now on."""
        self._each("set_params", shards)

    def open(self, last: bool) -> None:
        """A backward begins; `last`: no other one follows before `finish`."""
        self._each("open", last)

    def expect_last(self, params: Collection[nn.Parameter], rest: bool) -> None:
        """Under a pipeline one `open` covers several backwards. The next of them is the last that adds gradients to
        `params`; `rest`: those of all other parameters are complete."""
        self._each("expect_last", params, rest)

    def skip_unused(self, roots: Collection[torch.Tensor]) -> None:
        """The last backward begins, from `roots`: do not wait for parameters that it does not reach."""
        self._each("skip_unused", roots)

    def finish(self) -> None:
        """Set the complete gradient of each shard."""
        self._each("finish")

    def forget(self) -> None:
        """The gradients were used or dropped."""
        self._each("forget")

    def close(self) -> None:
        """Remove what this has added to the model."""
        self._each("close")

    def _each(self, method: str, *args: Any) -> None:
        for reduction in self.reductions:
            getattr(reduction, method)(*args)


class NothingSent:
    """The work of a group of one rank."""

    def wait(self) -> None:
        """Do nothing."""


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
    values = iter(torch.cat([tensor.to(tensors[0].device) for tensor in tensors]).tolist())
    return [list(itertools.islice(values, len(tensor))) for tensor in tensors]


REENTRANT = "CheckpointFunctionBackward"
"""The node of reentrant activation checkpointing, which runs a backward of its own."""


def find_reached(roots: Collection[torch.Tensor]) -> set[torch.Tensor] | None:
    """The leaves to which a backward from `roots` brings gradients; None if the graph does not show all of them."""
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, leaves = set(todo), {root for root in roots if root.grad_fn is None}
    while todo:
        node = todo.pop()
        if node.name() == REENTRANT:
            return None
        after = node.next_functions
        for other, _ in after:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
        if not after and (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
    return leaves


class Reducer(Reduction):
    """All-reduces the gradients of `shards` over `group`, or fewer of its ranks, once per optimizer step.

    Call `open` before each backward. In the last one of an accumulation cycle a complete bucket is sent when the next
    gradient arrives: then all hooks of its parameters have run, also those registered after this reducer's.
    `finish` sends the rest and waits; afterwards each shard holds the reduced gradient. A parameter without a gradient
    on any rank keeps none, as in one process; one that is unused on this rank only gets the other ranks' gradient.

    Running statistics (BatchNorm's mean and variance) are averaged too, so that evaluation needs no collective.

    Args:
        shards: in the order of the model. Only those that require gradients take part.
        buffers: the model's, by name. Running statistics are averaged, the others may differ between ranks.
        group: the data ranks.
        group_of: the ranks that hold a parameter, whose gradients stand for those of all of `group`: a mean is theirs,
            a sum is that mean times the number of `group`. None: all of `group`.

    Attributes:
        sums_once: gradients are elsewhere once they are summed, so that none can be added to them and summed again.
        state: of the gradients: "none" since the last update; "local" since `open`; "reduced" since `finish`; "stale"
            if one has arrived since then, from a backward without `open`. (Such a backward has to run on all ranks: it
            leads to another collective.)
    """

    sums_once: ClassVar[bool] = False

    def __init__(
        self,
        shards: Sequence[ParamShard],
        buffers: Buffers,
        group: dist.ProcessGroup,
        options: ReduceOptions,
        group_of: Callable[[nn.Parameter], dist.ProcessGroup] | None = None,
    ) -> None:
        self.options = options
        self.group = group
        self._times = 1 if options.mean else group.size() // options.loss_parts  # the mean over a bucket's group
        self._group_of = group_of or (lambda param: group)
        self.state: Literal["none", "local", "reduced", "stale"] = "none"
        named = [buffer for name, buffer in buffers.items() if name.rpartition(".")[2] in STATISTICS]
        self._statistics = [buffer for buffer in named if buffer.is_floating_point()]
        self._shards: list[ParamShard] = []
        self._left_out: set[nn.Parameter] = set()  # had no gradient from some last backward
        self._reached: set[torch.Tensor] | None = None  # the leaves that the graph of this last backward shows
        self._shows: bool | None = None  # graphs show all parameters that get gradients; None: not compared yet
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.set_params(shards)

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        """Reduce these shards from now on (parameters may be added to the optimizer, frozen or unfrozen). One that is
        frozen within a cycle stays until its end: it may have a gradient."""
        self.close()
        kept = set() if self.state == "none" else set(self._shards)
        self._shards = [shard for shard in shards if shard.param.requires_grad or shard in kept]
        self._buckets = self._make_buckets()
        self._left_out.clear()
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._arrived, bucket))
            for bucket in self._buckets
            for param in bucket.params
            if param.requires_grad
        ]
        self._reset()

    def open(self, last: bool) -> None:
        """In the `last` backward before the update buckets are sent as they fill.

        Raises:
            InputError: as `finish`.
        """
        self._reject_stale()
        if self.state == "reduced" and not self.options.mean:
            # These sums will be summed again. A mean of equal values changes nothing, a sum does.
            grads = [grad for shard in self._shards if (grad := shard.param.grad) is not None]
            if grads:
                share = torch.full((), 1 / self._times, dtype=torch.float64, device=grads[0].device)
                foreach_mul_(grads, share)
        self.state = "local"
        self._sends = last

    def expect_last(self, params: Collection[nn.Parameter], rest: bool) -> None:
        """See `Reduction`. With `rest` complete buckets are sent while the last backward runs."""
        if rest:
            self._sends = True
            for bucket in self._buckets:
                bucket.missing.intersection_update(params)
            self._send_complete()

    def skip_unused(self, roots: Collection[torch.Tensor]) -> None:
        """See `Reduction`. Only those are skipped that had no gradient in an earlier update: models that use all walk
        through the graph once. And only if no gradient has arrived that the graph did not show, from a backward within
        the backward (of a reversible layer, for example)."""
        if self._sends and self._shows is not False and (self._left_out or self._shows is None):
            self._reached = find_reached(roots)
            if self._reached is None:
                self._shows = False
            elif self._shows:
                for bucket in self._buckets:
                    bucket.missing -= self._left_out - self._reached
                self._send_complete()

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, and set each shard's reduced gradient.

        Raises:
            InputError: a backward outside the engine has added to gradients that are summed already.
        """
        self._reject_stale()
        if self._sends:
            self._left_out.update(*(bucket.missing for bucket in self._unsent))
        if self._reached is not None and self._shows is None:
            self._shows = True
        self._send_complete(everything=True)
        if self._statistics:
            self._average_statistics()
        self._receive()
        self._reset()
        self.state = "reduced"

    @property
    def is_complete(self) -> bool:
        """See `Reduction`."""
        return self.state == "reduced"

    def forget(self) -> None:
        """See `Reduction`."""
        if self.state == "local":
            self._reset()  # some buckets may have been sent
        self.state = "none"

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _reject_stale(self) -> None:
        is_stale = self.state in ("reduced", "stale") and not self.is_complete
        if is_stale and (self.sums_once or not self.options.mean):
            raise InputError(
                "gradients were added by a backward outside this engine after those of the update had been summed over "
                "ranks; call engine.backward(loss) for every loss"
            )

    def _reset(self) -> None:
        self._sends = False
        self._reached = None
        self._unsent = deque(self._buckets)
        self._inflight: deque[tuple[Any, Bucket]] = deque()
        for bucket in self._buckets:
            bucket.reset()

    def _arrived(self, bucket: Bucket, param: nn.Parameter) -> None:
        if self.state == "reduced":
            self.state = "stale"
        if not self._sends:
            return
        if self._reached is not None and param not in self._reached:
            self._shows = False
        if self._unsent and not self._unsent[0].missing:
            self._send_complete()  # buckets that were full before this gradient
        if bucket.sent is not None:
            name = bucket.shards[[id(held) for held in bucket.params].index(id(param))].name
            raise InputError(
                f"the gradient of {name!r} arrived after it was sent, from a backward within the last one; reentrant "
                "activation checkpointing does that: use checkpoint(..., use_reentrant=False)"
            )
        # Not sent here if this was its last gradient: more hooks of this parameter may follow, which change it.
        bucket.missing.discard(param)

    def _send_complete(self, everything: bool = False) -> None:
        """Send complete buckets in index order, because all ranks must send in the same order."""
        while self._unsent and (everything or not self._unsent[0].missing):
            bucket = self._unsent.popleft()
            while self._inflight and not self.options.has_room([sent for _, sent in self._inflight], bucket):
                self._inflight.popleft()[0].wait()
            self._inflight.append((self._send(bucket), bucket))

    def _make_buckets(self) -> list[Any]:
        return make_buckets(self._shards, self.options, self._group_of, Bucket)

    def _send(self, bucket: Any) -> Any:
        flat = bucket.pack()
        divisor = bucket.group.size() / self._times
        if divisor == bucket.group.size() and can_average(flat, bucket.group):
            return bucket.start(flat, dist.ReduceOp.AVG)
        if divisor != 1:
            flat.div_(divisor)  # before the sum, which could overflow in half precision
        return bucket.start(flat)

    def _receive(self, *asked: torch.Tensor) -> list[list[float]]:
        """Wait for all buckets in flight, and set their gradients. Returns the values of the tensors `asked`, which are
        read with the buckets' flags."""
        while self._inflight:
            self._inflight.popleft()[0].wait()
        absent = [bucket for bucket in self._buckets if bucket.absent]
        wanted = [*asked, *(bucket.flags for bucket in absent)]
        found = read_together(wanted) if wanted else []
        flags = dict(zip(absent, found[len(asked) :], strict=True))
        for bucket in self._buckets:
            bucket.unpack(flags.get(bucket, ()))
        return found[: len(asked)]

    def _average_statistics(self) -> None:
        held = self._statistics
        flat = torch.cat([b.reshape(-1).to(torch.promote_types(b.dtype, torch.float32)) for b in held])
        if can_average(flat, self.group):
            all_reduce(flat, self.group, dist.ReduceOp.AVG).wait()
        else:
            all_reduce(flat.div_(self.group.size()), self.group).wait()
        averaged = flat.split([buffer.numel() for buffer in held])
        foreach_copy_(held, [one.view_as(buffer) for one, buffer in zip(averaged, held, strict=True)])


class SharedGradients(Reducer):
    """Sums the gradients of `params` over the ranks of `group`. Each replicates these parameters and has a partial
    gradient. One all-reduce in fp32 per update.

    Args:
        shards: of the parameters that are trained.
    """

    def __init__(
        self, params: Collection[nn.Parameter], group: dist.ProcessGroup, shards: Sequence[ParamShard]
    ) -> None:
        self._params = params
        super().__init__(shards, {}, group, ReduceOptions(mean=False))

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        super().set_params([shard for shard in shards if shard.model_param in self._params])

    def open(self, last: bool) -> None:
        super().open(last=False)  # nothing is sent before the data ranks have their sums

    def expect_last(self, params: Collection[nn.Parameter], rest: bool) -> None:
        """Do nothing: nothing is sent before `finish`."""
