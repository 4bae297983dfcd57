"""Faults of data ranks: replicate, zero1 and fsdp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfmesh.amp.recipe import HALF
from halfmesh.engine.accumulation import Accumulation
from halfmesh.engine.parallelize import ParallelModel
from halfmesh.parallel import reducer
from halfmesh.parallel.reducer import Bucket, Reducer
from halfmesh.parallel.sharding.fsdp import FSDP
from halfmesh.parallel.sharding.fsdp_reducer import FSDPReducer
from halfmesh.parallel.sharding.zero1 import SliceBucket, Zero1, Zero1Reducer
from halfmesh.utils.param_shard import ParamShard, clear_grads

# -- gradients over the data ranks -----------------------------------------------------------------------------------


def _before_the_sum(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Data ranks sum what `change` makes of their gradients and the number of ranks."""
    inner = Bucket.pack
    patch.setattr(Bucket, "pack", lambda self: change(inner(self), dist.get_world_size()))


def data_divided_twice(patch: pytest.MonkeyPatch) -> None:
    """The mean over the data ranks is divided by their number once more."""
    _before_the_sum(patch, lambda flat, ranks: flat.div_(ranks))


def data_not_divided(patch: pytest.MonkeyPatch) -> None:
    """The mean over the data ranks is a sum."""
    _before_the_sum(patch, lambda flat, ranks: flat.mul_(ranks))


class _Done:
    """The work of a collective that is not called."""

    def wait(self) -> None:
        """Nothing was sent."""


def data_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """Data ranks keep their own gradients: an all-reduce is missing."""
    patch.setattr(Reducer, "_send", lambda self, bucket: (bucket.pack(), _Done())[1])


def last_bucket_lost(patch: pytest.MonkeyPatch) -> None:
    """The last bucket of gradients is not sent."""
    inner = Reducer._send

    def send(self: Reducer, bucket: Any) -> Any:
        return (bucket.pack(), _Done())[1] if bucket is self._buckets[-1] else inner(self, bucket)

    patch.setattr(Reducer, "_send", send)


def reduced_in_half(patch: pytest.MonkeyPatch) -> None:
    """Gradients are rounded to bfloat16 before they are summed."""
    patch.setattr(reducer, "reduce_dtype_of", lambda param, dtype: torch.bfloat16)


def half_gradients_reduced_in_half(patch: pytest.MonkeyPatch) -> None:
    """Gradients of weights in half precision are summed in it, where the config says float32."""
    inner = reducer.reduce_dtype_of
    patch.setattr(reducer, "reduce_dtype_of", lambda p, dtype: p.dtype if p.dtype in HALF else inner(p, dtype))


def weights_not_shared(patch: pytest.MonkeyPatch) -> None:
    """Each rank keeps the weights that it began with."""
    patch.setattr("halfmesh.engine.inputs.broadcast_initial_state", lambda context, model, optimizer: None)


def statistics_not_averaged(patch: pytest.MonkeyPatch) -> None:
    """BatchNorm's statistics stay each data rank's own."""
    patch.setattr(Reducer, "_average_statistics", lambda self: None)


def first_microbatch_lost(patch: pytest.MonkeyPatch) -> None:
    """The gradients of a cycle's first microbatches are cleared."""
    inner = Accumulation.count_microbatch

    def count(self: Accumulation) -> None:
        inner(self)
        if not self.is_last_microbatch:
            clear_grads(self.update.master_weights.grad_params)

    patch.setattr(Accumulation, "count_microbatch", count)


def microbatches_summed(patch: pytest.MonkeyPatch) -> None:
    """The mean over the microbatches of a cycle is a sum."""
    inner = Accumulation.__init__

    def init(self: Accumulation, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        self.seed_divisor = 1.0

    patch.setattr(Accumulation, "__init__", init)


def loss_weight_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Weighted losses are divided by the weight of this rank's."""
    inner = Accumulation.grad_divisor

    def grad_divisor(self: Accumulation) -> Any:
        self._context = None
        return inner(self)

    patch.setattr(Accumulation, "grad_divisor", grad_divisor)


def loss_weight_of_the_last(patch: pytest.MonkeyPatch) -> None:
    """Weighted losses are divided by the weight of the last microbatch."""
    patch.setattr(Accumulation, "add_weight", lambda self, weight: setattr(self, "_weight", weight))


# -- zero1 and fsdp --------------------------------------------------------------------------------------------------


def norm_of_parts_as_copies(patch: pytest.MonkeyPatch) -> None:
    """A part of a parameter counts in the norm as little as one of several copies."""
    inner = ParallelModel.make_shards

    def make_shards(self: ParallelModel, *args: Any) -> list[ParamShard]:
        shards = list(inner(self, *args))
        for shard in shards:
            shard.weight /= 1 if shard.source is None else self._context.dp_size
        return shards

    patch.setattr(ParallelModel, "make_shards", make_shards)


def _handed_out(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Parts get what `change` makes of the gradients that were received for them."""
    inner = SliceBucket.assign_grads

    def assign_grads(self: SliceBucket, received: torch.Tensor, unused: Any) -> None:
        inner(self, change(received), unused)

    patch.setattr(SliceBucket, "assign_grads", assign_grads)


def gradients_of_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    """A part is stepped with gradients that belong one element further."""
    _handed_out(patch, lambda grads: grads.roll(1))


def border_of_parts_lost(patch: pytest.MonkeyPatch) -> None:
    """The last element of each rank's part has no gradient: the end of a part is off by one."""
    _handed_out(patch, lambda grads: torch.cat([grads[:-1], torch.zeros_like(grads[-1:])]))


def bucket_not_gathered(patch: pytest.MonkeyPatch) -> None:
    """The new weights of one bucket stay on the ranks that have stepped them."""
    inner = Zero1._gather

    def gather(self: Zero1, bucket: SliceBucket) -> None:
        if bucket is not self._order[0]:
            inner(self, bucket)

    patch.setattr(Zero1, "_gather", gather)


def parts_gathered_in_other_order(patch: pytest.MonkeyPatch) -> None:
    """New weights are joined in another order than that of the ranks."""
    inner = Zero1._wait_oldest

    def land(self: Zero1) -> None:
        work, bucket, flat = self._inflight[0]
        work.wait()
        flat.copy_(flat.roll(bucket.chunk))
        inner(self)

    patch.setattr(Zero1, "_wait_oldest", land)


def parts_sent_in_each_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Gradients go to the ranks that step them in the backward of each microbatch; those of the last one count."""
    inner, arrived = Zero1Reducer.open, Zero1Reducer._arrived

    def sent_at_once(self: Zero1Reducer, *args: Any) -> None:
        arrived(self, *args)
        self._send_complete()  # also the last bucket, which would wait for the end of backward

    def opened(self: Zero1Reducer, last: bool) -> None:
        self._reset()  # the buckets of the microbatch before
        inner(self, True)

    patch.setattr(Zero1Reducer, "open", opened)
    patch.setattr(Zero1Reducer, "_arrived", sent_at_once)


def sum_divided_again(patch: pytest.MonkeyPatch) -> None:
    """What FSDP2 has averaged over the ranks is divided by their number once more."""
    inner = FSDPReducer._take_grads

    def take_grads(self: FSDPReducer, counts: Any) -> None:
        inner(self, counts)
        for shard, _ in self._sharded:
            if shard.param.grad is not None:
                shard.param.grad /= dist.get_world_size()

    patch.setattr(FSDPReducer, "_take_grads", take_grads)


def unit_not_summed(patch: pytest.MonkeyPatch) -> None:
    """FSDP2 is not told to sum the gradients of one block."""
    inner = FSDPReducer._set_gradient_sync

    def announce(self: FSDPReducer, *args: Any) -> None:
        inner(self, *args)
        self._strategy.unit_params[0][0].set_requires_gradient_sync(False)

    patch.setattr(FSDPReducer, "_set_gradient_sync", announce)


def old_weights_kept(patch: pytest.MonkeyPatch) -> None:
    """Weights that were gathered before an update are used after it."""
    inner = FSDP.begin

    def begin(self: FSDP) -> None:
        inner(self)
        for unit in self.units:
            unit.unshard()

    patch.setattr(FSDP, "begin", begin)
    patch.setattr(FSDP, "finish", lambda self: None)
