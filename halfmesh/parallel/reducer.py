"""Reductions of gradients over ranks: in buckets, while backward still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InputError, shorten
from ..utils.log import get_logger
from ..utils.param_shard import ParamShard
from ..utils.torch_private import edit_stamp, foreach_copy_, foreach_mul_
from .buckets import Bucket, make_buckets

_log = get_logger(__name__)

STATISTICS = ("running_mean", "running_var")
"""Names of buffers that are averaged: those of BatchNorm and InstanceNorm, and of layers that use their names."""


@dataclass(frozen=True)
class ReduceOptions:
    """Options of the reduction. Defaults: fp32 sums, 25 MiB buckets (as torch DDP), 8 in flight (as SageMaker)."""

    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 25 * 2**20
    max_inflight: int = 8
    mean: bool = True
    """Average over the ranks; False sums."""


class Reducer:
    """All-reduces the gradients of `shards` over `group`, once per optimizer step.

    Call `open` before each backward. In the last one of an accumulation cycle a complete bucket is sent when the next
    gradient arrives: then all hooks of its parameters have run, also those registered after this reducer's.
    `finish` sends the rest and waits; afterwards each shard holds the reduced gradient. A parameter without a gradient
    on any rank keeps none, as in one process; one that is unused on this rank only gets the other ranks' gradient.

    Running statistics (BatchNorm's mean and variance) are averaged too, so that evaluation needs no collective.

    Args:
        shards: in the order of the model. Only those that require gradients take part.
        buffers: the model's, by name. Running statistics are averaged, the others may differ between ranks.
    """

    def __init__(
        self,
        shards: Sequence[ParamShard],
        buffers: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        options: ReduceOptions | None = None,
    ) -> None:
        self.options = options or ReduceOptions()
        self.group = group
        self.statistics = [b for name, b in buffers.items() if _last_part(name) in STATISTICS and b.is_floating_point()]
        averaged = (*STATISTICS, "num_batches_tracked")
        self._own_buffers = {name: b for name, b in buffers.items() if _last_part(name) not in averaged}
        self._stamps: dict[str, tuple[int, int]] | None = None
        self.stale = False
        """True if a gradient arrived since `finish`, from a backward without `open`. (Such a backward has to run on all
        ranks: it leads to another collective.)"""
        self._finished = False
        self._collecting = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.set_params(shards)

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        """Reduce these shards from now on (parameters may be added to the optimizer, frozen or unfrozen)."""
        self.close()
        self._shards = [shard for shard in shards if self._takes_part(shard)]
        self._taking = {id(shard) for shard in self._shards}
        self._buckets = self._make_buckets()
        self._bucket_of = {id(shard): bucket for bucket in self._buckets for shard in bucket.shards}
        self._hooks = [
            shard.param.register_post_accumulate_grad_hook(partial(self._arrived, shard))
            for shard in self._shards
            if shard.param.requires_grad
        ]
        self._reset()

    def open(self, last: bool) -> None:
        """Begin a backward. In the `last` one before the update buckets are sent as they fill.

        Raises:
            InputError: as `finish`.
        """
        self._refuse_mixed_sums()
        if self._finished and not self.options.mean:
            # These sums will be summed again. A mean of equal values changes nothing, a sum does.
            grads = [grad for shard in self._shards if (grad := shard.param.grad) is not None]
            if grads:
                part = torch.full((), 1 / self.group.size(), dtype=torch.float64, device=grads[0].device)
                foreach_mul_(grads, part)
        self._finished = self.stale = False
        self._collecting = True
        self._reset()
        self._armed = last

    def expect_last(self, params: Collection[nn.Parameter]) -> None:
        """Under a pipeline one `open` covers several backwards. The next of them is the last that adds gradients to
        `params`; other parameters of the same buckets may get more later."""

    def begin_last_backward(self, params: Collection[nn.Parameter]) -> None:
        """Begin the last of several backwards. It adds gradients to `params` only; those of other parameters are
        complete. Complete buckets are sent while it runs."""
        self._armed = True
        expected = {id(param) for param in params}
        for bucket in self._buckets:
            bucket.missing &= {id(shard) for shard in bucket.shards if id(shard.param) in expected}
        self._launch_ready()

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, and set each shard's reduced gradient.

        Raises:
            InputError: a backward outside the engine has added to gradients that are summed already.
        """
        self._refuse_mixed_sums()
        self._armed = False
        self._launch_ready(everything=True)
        statistics = self._launch_statistics()
        self._receive()
        if statistics is not None:
            flat, work = statistics
            work.wait()
            sizes = [buffer.numel() for buffer in self.statistics]
            averaged = [part.view_as(b) for part, b in zip(flat.split(sizes), self.statistics, strict=True)]
            foreach_copy_(self.statistics, averaged)
        self._reset()
        self._finished, self.stale = True, False
        self._warn_of_own_buffers()

    @property
    def is_complete(self) -> bool:
        """True if the gradients are those of all ranks: none has arrived since `finish`."""
        return self._finished and not self.stale

    def forget(self) -> None:
        """Start again: the gradients were used or cleared."""
        self._finished = self.stale = self._collecting = False

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _takes_part(self, shard: ParamShard) -> bool:
        """True if `shard` is reduced. A parameter frozen within a cycle stays until its end: it may have a gradient."""
        return shard.param.requires_grad or (self._collecting and id(shard) in self._taking)

    def _refuse_mixed_sums(self) -> None:
        if self.stale and not self.options.mean:
            raise InputError(
                "gradients were added by a backward outside this engine after they had been summed over ranks; call "
                "engine.backward(loss) for every loss (or, without sequence parallelism, use loss_reduction='mean')"
            )

    def _warn_of_own_buffers(self) -> None:
        """After the second update: warn of buffers that have changed since the first, differently on each rank."""
        before, self._stamps = self._stamps, {name: edit_stamp(b) for name, b in self._own_buffers.items()}
        if before is None:
            return
        self._own_buffers = {}
        changed = [name for name, stamp in self._stamps.items() if stamp != before[name]]
        if changed:
            _log.warning(
                "the buffers %s change during training, on each data rank from its own batches: the ranks' models "
                "differ in them. halfmesh averages running_mean and running_var only; all-reduce others in the model",
                shorten(changed),
            )

    def _reset(self) -> None:
        self._armed = False
        self._next = 0
        self._inflight: deque[dist.Work] = deque()
        for bucket in self._buckets:
            bucket.reset()

    def _arrived(self, shard: ParamShard, _: nn.Parameter) -> None:
        self.stale = self._finished
        if not self._armed:
            return
        self._launch_ready()  # buckets that were full before this gradient
        bucket = self._bucket_of[id(shard)]
        if bucket.is_sent:
            raise InputError(
                f"the gradient of {shard.name!r} arrived twice in one backward, the second time after it was sent; "
                "reentrant activation checkpointing does that: use checkpoint(..., use_reentrant=False)"
            )
        # Not sent here if this was its last gradient: more hooks of this parameter may follow, which change it.
        bucket.missing.discard(id(shard))

    def _launch_ready(self, everything: bool = False) -> None:
        """Send complete buckets in index order, because all ranks must send in the same order."""
        while self._next < len(self._buckets) and (everything or not self._buckets[self._next].missing):
            if len(self._inflight) >= self.options.max_inflight:
                self._inflight.popleft().wait()
            bucket = self._buckets[self._next]
            self._next += 1
            self._inflight.append(self._send(bucket))

    def _make_buckets(self) -> list[Bucket]:
        return make_buckets(self._shards, self.options.dtype, self.options.bucket_bytes)

    def _send(self, bucket: Bucket) -> dist.Work:
        return self._all_reduce(bucket.pack())

    def _receive(self) -> None:
        """Wait for all buckets in flight, and set their gradients."""
        while self._inflight:
            self._inflight.popleft().wait()
        for bucket in self._buckets:
            bucket.unpack()

    def _launch_statistics(self) -> tuple[torch.Tensor, dist.Work] | None:
        if not self.statistics:
            return None
        parts = [buffer.reshape(-1).to(torch.promote_types(buffer.dtype, torch.float32)) for buffer in self.statistics]
        flat = torch.cat(parts) / self.group.size()
        return flat, self._all_reduce(flat, divide=False)

    def _all_reduce(self, flat: torch.Tensor, divide: bool = True) -> dist.Work:
        if divide and self.options.mean:
            flat.div_(self.group.size())  # before the sum, which could overflow in half precision
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        return work


class SharedGradients(Reducer):
    """Sums the gradients of `params` over the ranks of `group`. Each replicates these parameters and has a partial
    gradient. One all-reduce in fp32 per update.

    Args:
        shards: of the parameters that are trained.
        mean: divide the sum by the number of ranks.
    """

    def __init__(
        self,
        params: Collection[nn.Parameter],
        group: dist.ProcessGroup,
        shards: Sequence[ParamShard],
        mean: bool = False,
    ) -> None:
        self._params = params
        super().__init__(shards, {}, group, ReduceOptions(mean=mean))

    def open(self, last: bool) -> None:
        super().open(last=False)  # nothing is sent before the data ranks have their sums

    def begin_last_backward(self, params: Collection[nn.Parameter]) -> None:
        """Do nothing: nothing is sent before `finish`."""

    def _takes_part(self, shard: ParamShard) -> bool:
        return shard.model_param in self._params and super()._takes_part(shard)


class CompleteGradients:
    """Several reductions, one after the other."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._reductions = list(reductions)

    @property
    def is_complete(self) -> bool:
        """See `Reducer`."""
        return all(reduction.is_complete for reduction in self._reductions)

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        self._each(lambda reduction: reduction.set_params(shards))

    def open(self, last: bool) -> None:
        self._each(lambda reduction: reduction.open(last))

    def expect_last(self, params: Collection[nn.Parameter]) -> None:
        self._each(lambda reduction: reduction.expect_last(params))

    def begin_last_backward(self, params: Collection[nn.Parameter]) -> None:
        self._each(lambda reduction: reduction.begin_last_backward(params))

    def finish(self) -> None:
        self._each(lambda reduction: reduction.finish())

    def forget(self) -> None:
        self._each(lambda reduction: reduction.forget())

    def close(self) -> None:
        self._each(lambda reduction: reduction.close())

    def _each(self, call: Callable[[Reduction], None]) -> None:
        for reduction in self._reductions:
            call(reduction)


Reduction = Reducer | CompleteGradients


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
