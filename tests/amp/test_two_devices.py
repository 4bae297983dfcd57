"""Updates of parameters on two devices: those in host memory, where the update is decided, and some that stayed.

There need not be a GPU: tensors without memory know where they were, and refuse to be mixed.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from halfmesh import torch_private
from halfmesh.amp.collected import Gradients
from halfmesh.amp.optimizer import MixedPrecisionOptimizer
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.amp.rules import UpdateRules
from halfmesh.amp.stepper import _multiply
from halfmesh.amp.verdict import measure
from halfmesh.parallel.buckets import make_buckets
from halfmesh.shard import OneRank, ParamShard

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
STATIC = Recipe(loss_scale=LossScale(initial=8.0, dynamic=False))
MASTERS = Recipe(param_dtype=torch.float16, compute_dtype=torch.float16, master_weights=True)
OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adamw": torch.optim.AdamW}


@pytest.fixture
def no_memory():
    with torch_private.dry_run_mode():
        yield


def make_shards(dtype=torch.float32):
    devices = {"part": HOST, "scale": GPU, "other part": HOST}
    return [
        ParamShard(name, nn.Parameter(torch.ones(3, 2, device=device, dtype=dtype)), weight=0.5)
        for name, device in devices.items()
    ]


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", [FP32, STATIC, MASTERS], ids=["fp32", "scaled", "masters"])
@pytest.mark.parametrize("groups", ["one", "for each device"])
def test_an_update_keeps_to_the_devices(no_memory, recipe, optimizer, norm_type, groups):
    shards = make_shards(recipe.param_dtype or torch.float32)
    apart = [[s.param for s in shards if s.param.device == device] for device in (HOST, GPU)]
    held = [{"params": params} for params in apart] if groups != "one" else [s.param for s in shards]
    rules = UpdateRules(max_norm=1.0, norm_type=norm_type, track_grad_norm=True)
    update = MixedPrecisionOptimizer(OPTIMIZERS[optimizer](held), shards, recipe, rules=rules, device=HOST)
    for divisor in (1.0, 4.0, torch.full((), 4.0, device=GPU)):
        with update.collecting():
            for shard in shards:
                shard.param.grad = torch.ones_like(shard.param)
        seed = update.losses.seed(torch.ones((), device=GPU), 0, 2.0)
        assert seed.device == GPU
        assert update._measure(update.gradients()).norm.device == HOST
        assert {number.device for number in update._scale(divisor) if number is not None} <= {HOST}
        update.step(divisor)
        update.zero_grad()
    for shard in shards:
        target = update.holdings.target(shard)
        assert target.device == shard.param.device
        moments = [v for n, v in update.optimizer.state[target].items() if n != "step"]
        assert {moment.device for moment in moments} == {target.device}


def test_gradients_are_multiplied_where_they_are(monkeypatch):
    calls = []
    multiply = torch_private.foreach_mul_
    monkeypatch.setattr(torch_private, "foreach_mul_", lambda *args: calls.append(args) or multiply(*args))
    here, there = torch.full((3,), 2.0), torch.full((3,), 2.0, device="meta")
    _multiply([here, None, there], torch.tensor(0.5))
    assert here.tolist() == [1.0] * 3
    assert [([g.device.type for g in grads], factor.device.type) for grads, factor in calls] == [
        (["cpu"], "cpu"),
        (["meta"], "meta"),
    ]


def test_no_bucket_has_two_devices(no_memory):
    buckets = make_buckets(make_shards(), torch.float32, 2**20)
    assert [[shard.name for shard in bucket.shards] for bucket in buckets] == [["other part"], ["scale"], ["part"]]


def test_norms_are_taken_where_gradients_are(no_memory, monkeypatch):
    taken, norm = [], torch_private.foreach_norm
    monkeypatch.setattr(torch_private, "foreach_norm", lambda grads, *rest: taken.append(grads) or norm(grads, *rest))
    shards = make_shards()
    grads = Gradients.of((shard, torch.ones_like(shard.param)) for shard in shards)
    verdict = measure(grads, OneRank(), HOST, count_zeros=True)
    assert [{grad.device for grad in grads} for grads in taken] == [{HOST}, {GPU}]
    assert {verdict.norm.device, verdict.found_inf.device, verdict.num_zeros.device} == {HOST}
