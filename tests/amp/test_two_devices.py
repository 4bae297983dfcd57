"""Updates of parameters on two devices: those in host memory, where the update is decided, and some that stayed.

There need not be a GPU: tensors without memory know where they were, and refuse to be mixed.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from halfmesh.amp import stepper
from halfmesh.amp.optimizer import MixedPrecisionOptimizer
from halfmesh.amp.recipe import FP32, LossScale, Recipe, UpdateOptions
from halfmesh.dry_run.tracker import dry_run_mode
from halfmesh.utils.param_shard import OneRank, ParamShard
from tests.support.updates import OPTIMIZERS

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
STATIC = Recipe(loss_scale=LossScale(initial=8.0, dynamic=False, skips=False))
MASTERS = Recipe(param_dtype=torch.float16, compute_dtype=torch.float16, master_weights=True)


def make_shards(dtype=torch.float32):
    devices = {"part": HOST, "scale": GPU, "other part": HOST}
    return [
        ParamShard(name, nn.Parameter(torch.ones(3, 2, device=device, dtype=dtype)), weight=0.5)
        for name, device in devices.items()
    ]


@pytest.mark.parametrize(
    ("recipe", "optimizer", "norm_type"),
    [(FP32, "sgd_momentum", math.inf), (STATIC, "adamw", 2.0), (MASTERS, "adamw", 2.0)],
    ids=["fp32", "scaled", "masters"],
)
@dry_run_mode()
def test_an_update_keeps_to_the_devices(recipe, optimizer, norm_type, monkeypatch):
    multiplied, multiply = [], stepper.foreach_mul_
    monkeypatch.setattr(stepper, "foreach_mul_", lambda grads, by: multiplied.append(grads) or multiply(grads, by))
    shards = make_shards(recipe.param_dtype or torch.float32)
    apart = [{"params": [s.param for s in shards if s.param.device == device]} for device in (HOST, GPU)]
    for params in (apart, [s.param for s in shards]):  # a group for each device, and one
        # torch's fused SGD cannot run without memory.
        fused = False if optimizer == "sgd_momentum" else "auto"
        options = UpdateOptions(fused=fused, max_norm=1.0, norm_type=norm_type, track_grad_norm=True)
        update = MixedPrecisionOptimizer(
            OPTIMIZERS[optimizer](params), shards, recipe, OneRank(), options, {}, device=HOST, publisher=None
        )
        for divisor in (1.0, 4.0, torch.full((), 4.0, device=GPU)):
            update.before_backward()
            for shard in shards:
                shard.param.grad = torch.ones_like(shard.param)
            update.after_backward()
            assert update.clip_grad_norm_(1.0, divisor).device == HOST
            multiplied.clear()
            update.step(divisor)
            devices = [grad.device for grads in multiplied for grad in grads]
            assert sorted(map(str, devices)) in ([], ["cpu", "cpu", "cuda:0"]), "all, or none by a fused kernel"
            update.zero_grad()
        for group in update.optimizer.param_groups:
            for target in group["params"]:
                moments = [v for n, v in update.optimizer.state[target].items() if n != "step"]
                assert {moment.device for moment in moments} == {target.device}
        update.close()
