"""Reduces gradients over ranks in buckets, while backward still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InputError
from ..utils.param_shard import ParamShard
from ..utils.torch_private import foreach_copy_, foreach_mul_
from .buckets import Bucket, ReduceOptions, all_reduce, can_average, make_buckets, read_together

Buffers = Mapping[str, torch.Tensor]
"""The buffers of a model, by name."""

STATISTICS = ("running_mean", "running_var")
"""Names of buffers that are averaged: those of BatchNorm and InstanceNorm, and of layers that use their names."""


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


REENTRANT = "CheckpointFunctionBackward"
"""The node of reentrant activation checkpointing, which runs a separate backward."""


def find_reached(roots: Collection[torch.Tensor]) -> set[torch.Tensor] | None:
    """The leaves to which a backward from `roots` brings gradients; None if the graph does not show all of them."""
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, leaves = set(todo), {root for root in roots if root.grad_fn is None}
    while todo:
        node = todo.pop()
        if node.name() == REENTRANT:
            return None
        after = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= after
        todo += after
        if not node.next_functions and (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
    return leaves


class Reducer(Reduction):
    """All-reduces the gradients of `shards` over `group`, or fewer of its ranks, once per optimizer step.

    Call `open` before each backward. In the last one of an accumulation cycle a complete bucket is sent when the next
    gradient arrives: then all hooks of its parameters have run, also those registered after this reducer's.
    `finish` sends the rest and waits; afterwards each shard holds the reduced gradient. A parameter without a gradient
    on any rank keeps none, as in one process; one that is unused on this rank only gets the other ranks' gradient.

    Running statistics (BatchNorm's mean and variance) are also averaged, so that evaluation needs no collective.

    Args:
        shards: the shards in the order of the model. Only those that require gradients take part.
        buffers: the model's buffers, by name. Running statistics are averaged, the others may differ between ranks.
        group: the data ranks.
        group_of: returns the ranks that hold a parameter. A mean is taken over their gradients, and a sum is that mean
            times the size of `group`. None: all of `group`.

    Attributes:
        sums_once: gradients are elsewhere once they are summed, so that none can be added to them and summed again.
        state: of the gradients: "none" since the last update; "local" since `open`; "reduced" since `finish`; "stale"
            if one has arrived since then, from a backward without `open`. (Such a backward must run on all ranks: it
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
                "a backward outside this engine changed summed gradients; use engine.backward for every loss"
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
                f"the gradient of {name!r} changed after it was sent, by a backward inside the last one; reentrant "
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
        found = read_together([*asked, *(bucket.flags for bucket in absent)])
        flags = dict(zip(absent, found[len(asked) :], strict=True))
        for bucket in self._buckets:
            bucket.unpack(flags.get(bucket, ()))
        return found[: len(asked)]

    def _average_statistics(self) -> None:
        held = self._statistics
        flat = torch.cat([b.reshape(-1).to(torch.promote_types(b.dtype, torch.float32)) for b in held])
        all_reduce(flat.div_(self.group.size()), self.group).wait()
        averaged = flat.split([buffer.numel() for buffer in held])
        foreach_copy_(held, [one.view_as(buffer) for one, buffer in zip(averaged, held, strict=True)])


class SharedGradients(Reducer):
    """Sums the gradients of `params` over the ranks of `group`. Each replicates these parameters and has a partial
    gradient. Once per update, in fp32 or more.

    Args:
        shards: the shards of the parameters that are trained.
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
