"""Faults that are put into zero1 and fsdp on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.amp import master_weights
from halfmesh.division import Division
from halfmesh.parallel.sharding.fsdp import FSDP
from halfmesh.parallel.sharding.fsdp_reducer import FSDPReducer
from halfmesh.parallel.sharding.slice_bucket import SliceBucket
from halfmesh.parallel.sharding.zero1 import Zero1, Zero1Reducer
from halfmesh.shard import ParamShard

from .cells import Cell
from .training import Outcome, train


def norm_of_parts_as_copies(patch: pytest.MonkeyPatch) -> None:
    """A part of a parameter counts in the norm as little as one of several copies."""
    inner = Division.make_shards

    def make_shards(self: Division, *args: Any) -> list[ParamShard]:
        shards = inner(self, *args)
        for shard in shards:
            shard.weight /= 1 if shard.source is None else self._context.dp_size
        return shards

    patch.setattr(Division, "make_shards", make_shards)


def gradients_of_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    """A part is stepped with gradients that belong one element further."""
    inner = SliceBucket.hand_out

    def hand_out(self: SliceBucket, nowhere: Any) -> None:
        self._received = self._received.roll(1)
        inner(self, nowhere)

    patch.setattr(SliceBucket, "hand_out", hand_out)


def bucket_not_gathered(patch: pytest.MonkeyPatch) -> None:
    """The new weights of one bucket stay on the ranks that have stepped them."""
    inner = Zero1._gather

    def gather(self: Zero1, bucket: SliceBucket) -> None:
        if bucket is not self._order[0]:
            inner(self, bucket)

    patch.setattr(Zero1, "_gather", gather)


def parts_sent_in_each_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Gradients go to the ranks that step them in the backward of each microbatch; those of the last one count."""
    inner, arrived = Zero1Reducer.open, Zero1Reducer._arrived

    def sent_at_once(self: Zero1Reducer, *args: Any) -> None:
        arrived(self, *args)
        self._launch_ready()  # also the last bucket, which would wait for the end of backward

    patch.setattr(Zero1Reducer, "open", lambda self, last: inner(self, True))
    patch.setattr(Zero1Reducer, "_arrived", sent_at_once)


def masters_of_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Masters begin with the values that lie one element further."""
    inner = master_weights.make_master
    patch.setattr(master_weights, "make_master", lambda param: nn.Parameter(inner(param).detach().roll(1)))


def sum_divided_again(patch: pytest.MonkeyPatch) -> None:
    """What FSDP2 has averaged over the ranks is divided by their number once more."""
    inner = FSDPReducer._take_grads

    def take_grads(self: FSDPReducer, counts: Any) -> None:
        inner(self, counts)
        for shard, _ in self._sharded:
            if shard.param.grad is not None:
                shard.param.grad /= dist.get_world_size()

    patch.setattr(FSDPReducer, "_take_grads", take_grads)


def old_weights_kept(patch: pytest.MonkeyPatch) -> None:
    """What was gathered before an update is used after it."""
    patch.setattr(FSDP, "finish", lambda self: None)


@dataclass(frozen=True)
class Kept(Cell):
    """One in which fsdp keeps gathered weights."""

    def config(self, **options: Any) -> dict[str, Any]:
        config = super().config(**options)
        config["parallel"]["data"]["reshard_after_forward"] = False
        return config


def train_looking_ahead(rank: int, world_size: int, cell: Cell) -> Outcome:
    """With a forward in training between backward and step, which gathers the weights again."""
    call, step = halfmesh.Engine.__call__, halfmesh.Engine.step
    seen: list[torch.Tensor] = []

    def note(self: halfmesh.Engine, x: torch.Tensor) -> Any:
        seen[:] = [x]
        return call(self, x)

    def look_ahead(self: halfmesh.Engine) -> Any:
        call(self, *seen)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halfmesh.Engine, "__call__", note)
        patch.setattr(halfmesh.Engine, "step", look_ahead)
        return train(rank, world_size, cell)
