"""What one rank sends to itself stays what it is: over gloo, and over NCCL with RANKS_ON=nccl-one (step 6 of `day.py`),
which is all of NCCL that one GPU can show."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.parallel.buckets import ReduceOptions
from halfmesh.parallel.reducer import Reducer
from halfmesh.parallel.sharding.zero1 import SliceBucket
from halfmesh.utils.param_shard import ParamShard
from tests.support.ranks import here, rank_device, run_ranks


def objects(rank, world_size):
    found: list[Any] = [None]
    dist.all_gather_object(found, {"rank": 0})
    sent = ["text"]
    dist.broadcast_object_list(sent, 0, device=rank_device())
    assert (found, sent) == ([{"rank": 0}], ["text"])


def groups(rank, world_size):
    """Of both backends: for tensors, and for the host."""
    for backend in (None, "gloo"):
        value = torch.ones(3, device=rank_device() if backend is None else "cpu")
        dist.all_reduce(value, group=dist.new_group([0], backend=backend))
        assert value.sum() == 3


def model_and_shards() -> tuple[nn.Module, list[ParamShard]]:
    torch.manual_seed(0)
    model = here(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4)))
    return model, [ParamShard(name, param) for name, param in model.named_parameters()]


def backward(model: nn.Module) -> nn.Module:
    model(here(torch.ones(4, 8))).square().sum().backward()
    return model


def all_reduced(rank, world_size):
    model, shards = model_and_shards()
    reducer = Reducer(shards, dict(model.named_buffers()), dist.group.WORLD, ReduceOptions())
    reducer.open(last=True)
    backward(model)
    reducer.finish()
    pairs = zip(model.parameters(), backward(model_and_shards()[0]).parameters(), strict=True)
    assert all(torch.equal(param.grad, other.grad) for param, other in pairs)


def scattered_and_gathered(rank, world_size):
    """By zero1: one rank has all of the slices."""
    model, shards = model_and_shards()
    with torch.no_grad():
        bucket = SliceBucket(shards, torch.float32, dist.group.WORLD, (), Counter())
        with torch.enable_grad():
            expected = [param.grad.clone() for param in backward(model).parameters()]
        bucket.start(bucket.pack()).wait()
        bucket.assign_grads(bucket.sent, ())
        params = [part.param for part in bucket.slices]
        assert all(torch.equal(param.grad, grad.flatten()) for param, grad in zip(params, expected, strict=True))
        work, flat = bucket.gather(params)
        work.wait()
        assert all(map(torch.equal, model.parameters(), bucket.views(flat)))


@pytest.mark.distributed
@pytest.mark.parametrize("case", [objects, groups, all_reduced, scattered_and_gathered])
def test_what_one_rank_sends_to_itself(case):
    run_ranks(case, 1)
