"""Launches of a step on a GPU, counted without one: a few for each bucket, whatever the number of parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from tests.counts.test_sent import TENSOR, Block
from tests.support.fake_gpu import CountLaunches, fake_gpu, give_gradients
from tests.support.models import MODES, adamw, sgd
from tests.support.ranks import here, rank_device, run_ranks

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch for CUDA")

OF_A_STEP, OF_A_BUCKET = 40, 6
LAYERS = 30
"""Each with a weight and a bias: more parameters than launches are allowed in a step of one bucket."""
WIDE_SUMS = {"gradient_dtype": "float32"}
CASES = {
    **{name: (MODES[name], adamw) for name in ("none", "torch_fp16", "naive_fp16", "naive_bf16", "apex_o1", "apex_o2")},
    "sgd": (MODES["torch_fp16"], sgd),
    "fp32_sums": (MODES["naive_bf16"] | WIDE_SUMS | {"gradient_accumulation": 2}, adamw),
    "zeros": ({"fp16": {"mode": "naive", "log_num_zeros_in_grad": True}}, adamw),
    "split": ({"bf16": {"mode": "naive", "masters": "split"}}, adamw),
}
HALF_SUMS = {"reduce_dtype": "bfloat16"}
MODEL_LAYOUTS = {"fsdp": {"data": "fsdp"}, "tensor": TENSOR, "pipeline": {"pipeline": {"size": 2, "microbatches": 2}}}


def launches(config, optimizer=adamw, losses=1):
    """Of the second of two steps, between the gradients' arrival and its end; and what the host waited for."""
    accumulation = config.get("gradient_accumulation", 1)
    with fake_gpu() as gpu:
        with torch.device("cuda", 0):
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
            x, y = torch.empty(8, 8), torch.zeros(8, dtype=torch.int64)
        engine = halfmesh.initialize(
            model, lambda p: optimizer(p), nn.CrossEntropyLoss(), None, config | {"clip_grad_norm": 0.5}, device="cuda"
        )

        def step():
            for _ in range(accumulation):
                engine.zero_grad()
                output = engine(x)
                found = [engine.criterion(output, y) for _ in range(losses)]
                with gpu.watch(False):
                    for number, loss in enumerate(found):
                        engine.backward(loss, number, retain_graph=True)
                    engine.step()

        with give_gradients(gpu, engine.model.parameters):
            step()
            gpu.launched.clear()
            step()
        return len(gpu.launched), gpu


@pytest.mark.parametrize("name", CASES)
def test_launches_do_not_grow_with_the_parameters(name):
    config, optimizer = CASES[name]
    count, gpu = launches(config, optimizer)
    assert count <= OF_A_STEP + OF_A_BUCKET, gpu.launched
    assert gpu.found == []


def test_losses_with_a_scale_each():
    for level in ("O1", "O2"):
        config = {"fp16": {"mode": "apex", "opt_level": level, "num_losses": 2}}
        count, gpu = launches(config, losses=2)
        assert count <= 2 * OF_A_STEP + 3 * OF_A_BUCKET, gpu.launched  # each backward is unscaled and measured


@pytest.fixture
def two_ranks():
    """This process is rank 0 of two that send nothing."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("data", "mode", "bucket_mb"),
    [
        ({"strategy": "replicate"}, "none", 25),
        ({"strategy": "replicate"}, "naive_fp16", 0.001),
        ({"strategy": "replicate", **HALF_SUMS}, "none", 25),  # sums are widened
        ({"strategy": "zero1"}, "torch_fp16", 25),
        ({"strategy": "zero1", **HALF_SUMS}, "naive_bf16", 0.001),
    ],
)
def test_launches_of_data_ranks(data, mode, bucket_mb, two_ranks):
    """With 25 MiB there is one bucket, with 1 KiB one for a few layers."""
    data = data | {"bucket_mb": bucket_mb}
    count, gpu = launches(MODES[mode] | {"parallel": {"data": data}})
    of_norm = 1
    buckets = gpu.launched.count("c10d::_reduce_scatter_base_") or gpu.launched.count("c10d::allreduce_") - of_norm
    assert buckets > 3 if bucket_mb < 1 else buckets == 1
    assert count <= OF_A_STEP + OF_A_BUCKET * buckets, (buckets, gpu.launched)
    assert not [what for what in gpu.found if " reads" in what or "synchronize" in what]


def launches_of_shards(rank, world_size, parallel):
    """By mode, the operations of a fifth step on this rank, without those that arrive with the gradients. (The first
    three look for mistakes.)"""
    found = {}
    for mode in ("none", "naive_fp16"):
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        config = MODES[mode] | {"clip_grad_norm": 0.5, "parallel": parallel}
        engine = halfmesh.initialize(model, adamw, nn.CrossEntropyLoss(), None, config, device=rank_device())
        for _ in range(5):
            engine.zero_grad()
            loss = engine.criterion(engine(here(torch.ones(8, 8))), here(torch.zeros(8, dtype=torch.int64)))
            engine.backward(loss)
            with CountLaunches() as counted:
                engine.step()
        engine.close()
        found[mode] = counted.names
    return found


@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("layout", MODEL_LAYOUTS)
def test_launches_where_ranks_hold_parts_of_the_model(layout):
    for found in run_ranks(launches_of_shards, 2, MODEL_LAYOUTS[layout]):
        for mode, names in found.items():
            assert "aten::_fused_adamw_" in names, "the update was counted"
            assert len(names) <= OF_A_STEP + OF_A_BUCKET, (mode, names)
