"""Gradients on their way to the ranks that step them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..._torch import has_grad_hooks
from ...errors import InputError, shorten
from ...shard import ParamShard
from ..reducer import ReduceOptions, Reducer

if TYPE_CHECKING:
    from .fsdp import FullyShard
    from .slice_bucket import SliceBucket
    from .zero1 import Slices


class SliceReducer(Reducer):
    """Sums the gradients of whole parameters to the ranks that step them, once per optimizer step.

    Takes and gives what `Reducer` does, but for the parts of `slices`: gradients arrive in the model's parameters, and
    are those of the parts afterwards.

    Raises:
        InputError: parameters were put into the optimizer that were not cut.
    """

    def __init__(
        self,
        slices: Slices,
        shards: Sequence[ParamShard],
        buffers: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        options: ReduceOptions,
    ) -> None:
        self._slices = slices
        self._buckets: list[SliceBucket]  # type: ignore[assignment]
        super().__init__(shards, buffers, group, options)

    def cover(self, shards: Sequence[ParamShard]) -> None:
        for shard in shards:
            shard.param.requires_grad_(shard.model_param.requires_grad)
        super().cover(_sources(shards))

    def covers(self, shards: Sequence[ParamShard]) -> bool:
        return super().covers(_sources(shards))

    def open(self, last: bool) -> None:
        self._slices.follow()
        for shard in self._shards if self._finished else ():
            shard.param.grad = None
        super().open(last)

    def finish(self) -> None:
        if self.stale:
            raise InputError(
                "gradients were added by a backward outside this engine after they had been given to the ranks that "
                "step them (data='zero1'); call engine.backward(loss) for every loss"
            )
        super().finish()
        for bucket in self._buckets:
            bucket.withhold()

    def _make_buckets(self) -> list[Any]:
        taking = {id(shard) for shard in self._shards}
        return [bucket for bucket in self._slices.buckets if any(id(shard) in taking for shard in bucket.shards)]

    def _send(self, bucket: Any) -> dist.Work:
        work, flat = bucket.scatter(self.group, self.group.size() if self.options.mean else 1)
        self._count(flat, divide=False)
        return work

    def _receive(self) -> None:
        if not self._buckets:  # a stage of which nothing is trained
            return
        had = [0.0 if i in b.absent else 1.0 for b in self._buckets for i in range(len(b.shards))]
        flags = torch.tensor(had).to(self._shards[0].param.device, non_blocking=True)
        work = self._all_reduce(flags, divide=False)
        while self._inflight:
            self._inflight.popleft().wait()
        work.wait()
        counts = flags.tolist() if 0.0 in had else had
        for bucket in self._buckets:
            own, counts = counts[: len(bucket.shards)], counts[len(bucket.shards) :]
            bucket.hand_out([index for index in bucket.absent if own[index] == 0])


class ShardReducer(Reducer):
    """`halfmesh.parallel.gradient_sums.Reduction` of a model that FSDP2 shards: it reduces what is left whole, and
    running statistics, by itself.

    Raises:
        InputError: a cycle ends that FSDP2 was not told of before its last backward; parameters were put into the
            optimizer that are not sharded; the model failed in the middle of a step.
    """

    def __init__(
        self,
        sharded: FullyShard,
        shards: Sequence[ParamShard],
        buffers: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        options: ReduceOptions,
        device: torch.device,
    ) -> None:
        self._sharded = sharded
        self._device = device
        self._own_stale = False
        self._is_open = False
        self._is_sent = False
        self._is_broken = False
        super().__init__(shards, buffers, group, options)

    @property
    def stale(self) -> bool:
        """Whether gradients arrived since `finish`, in what is whole or in what FSDP2 holds."""
        return self._own_stale or (self._finished and self._sharded.was_used)

    @stale.setter
    def stale(self, value: bool) -> None:
        self._own_stale = value

    def cover(self, shards: Sequence[ParamShard]) -> None:
        super().cover(self._sharded.left_whole(shards))

    def covers(self, shards: Sequence[ParamShard]) -> bool:
        return super().covers(self._sharded.left_whole(shards))

    def open(self, last: bool) -> None:
        if self._is_broken:
            raise InputError(
                "the gradients of an update were dropped before its end (an error in backward, or load_state_dict "
                "between two microbatches); under data='fsdp' some of them are on their way to others, so that the "
                "ranks do not agree any more; end the run"
            )
        hooked = [p.name for p in self._sharded.parts if has_grad_hooks(p.source.param)]  # type: ignore[union-attr]
        if hooked:
            raise InputError(
                f"hooks were registered on the gradient of {shorten(hooked)}, which FSDP2 never calls; remove them, or "
                "use data='zero1'"
            )
        self._sharded.refuse_other_memory()
        frozen = self._sharded.frozen_elsewhere
        if frozen:
            raise InputError(
                f"requires_grad of {shorten(frozen)} was changed on the parameters that the model came with, but under "
                "data='fsdp' it computes with others; change it on engine.model's, as in engine.model.requires_grad_()"
            )
        self._is_open, self._is_sent = True, last
        self._sharded.announce(last)
        super().open(last)

    def expect_last(self, params: Collection[nn.Parameter]) -> None:
        self._sharded.announce(True, params)

    def expect_rest(self, params: Collection[nn.Parameter]) -> None:
        self._is_sent = True
        super().expect_rest(params)

    def finish(self) -> None:
        if not self._is_sent:
            raise InputError(
                "engine.step(last=True) ended a cycle whose last backward had run already; under data='fsdp' gradients "
                "are summed in that backward, which has to be told before. Let engine.dataloader feed the loop (it "
                "knows its end), give it as many batches as gradient_accumulation divides, or use data='zero1'"
            )
        if self._finished:
            raise InputError(
                "gradients were added by a backward outside this engine after those of the update had been summed "
                "(data='fsdp'); call engine.backward(loss) for every loss"
            )
        used = self._sharded.used
        counts = torch.tensor(used, dtype=torch.float32).to(self._device, non_blocking=True)
        work = self._all_reduce(counts, divide=False)
        super().finish()
        work.wait()
        self._sharded.take_grads([1.0] * len(used) if all(used) else counts.tolist())
        self._is_open = False

    def forget(self) -> None:
        super().forget()
        self._is_broken |= self._is_open


def _sources(shards: Sequence[ParamShard]) -> list[ParamShard]:
    new = [shard.name for shard in shards if shard.source is None]
    if new:
        raise InputError(
            f"{shorten(new)} came into the optimizer after initialize, but data='zero1' cuts its parameters there; put "
            "them in before (frozen ones may be unfrozen later), or use data='replicate'"
        )
    return [shard.source for shard in shards if shard.source is not None]
