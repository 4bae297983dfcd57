"""Gradients on their way to the ranks that step them, and what stands in `param.grad` where they are elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InputError, shorten
from ...shard import ParamShard
from ..reducer import ReduceOptions, Reducer

if TYPE_CHECKING:
    from .fully_shard import FullyShard
    from .slice_bucket import SliceBucket
    from .zero1 import Zero1

SCATTERED = "where under data='zero1' each rank has the sums of its own shard only"
UNFINISHED = (
    "where under data='fsdp' it is still multiplied by a loss scale, not yet divided by weights, or one rank's part of "
    "the model's"
)


class WithheldGradient(torch.Tensor):
    """A gradient without values: shape and dtype are the parameter's, and computing with it raises InputError.

    None in its place would let `torch.nn.utils.clip_grad_norm_` pass over the parameter without a word.
    """

    param_name: str
    why: str

    @staticmethod
    def of(param: torch.Tensor, name: str, why: str) -> WithheldGradient:
        """That of `param`, which has this name in the model."""
        grad: WithheldGradient = torch.Tensor._make_wrapper_subclass(
            WithheldGradient, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        grad.param_name, grad.why = name, why
        return grad

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        given = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        grad = next(tensor for tensor in given if isinstance(tensor, cls))
        raise InputError(
            f"the gradient of {grad.param_name!r} was used between engine.backward and engine.step ({function}), "
            f"{grad.why}. To clip, set clip_grad_norm in the config or call engine.clip_grad_norm_(max_norm), which "
            "returns the norm; to add another loss, call engine.backward(loss)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the gradient of {self.param_name!r}, {self.why}>"


class Zero1Reducer(Reducer):
    """Sums the gradients of whole parameters to the ranks that step them, once per optimizer step.

    Takes and gives what `Reducer` does, but for the parts of zero1: gradients arrive in the model's parameters, and
    are those of the parts afterwards.

    Raises:
        InputError: parameters were put into the optimizer that were not cut.
    """

    def __init__(
        self,
        strategy: Zero1,
        shards: Sequence[ParamShard],
        buffers: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        options: ReduceOptions,
    ) -> None:
        self._strategy = strategy
        self._buckets: list[SliceBucket]  # type: ignore[assignment]
        super().__init__(shards, buffers, group, options)

    def cover(self, shards: Sequence[ParamShard]) -> None:
        for shard in shards:
            shard.param.requires_grad_(shard.model_param.requires_grad)
        super().cover(_sources(shards))

    def covers(self, shards: Sequence[ParamShard]) -> bool:
        return super().covers(_sources(shards))

    def open(self, last: bool) -> None:
        self._strategy.follow()
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
        return [bucket for bucket in self._strategy.buckets if any(id(shard) in taking for shard in bucket.shards)]

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


class FSDPReducer(Reducer):
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
        self._sharded.refuse_lost_changes()
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
