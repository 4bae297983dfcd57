"""The throughput hook's operations: those of one process in every layout."""

from types import SimpleNamespace

import gpt
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import halfmesh
from halfmesh.hooks import ThroughputHook
from halfmesh.trainer.throughput import PEAK_FLOPS, peak_flops
from tests.support.checkpoint_runs import make_engine as engine_in_layout
from tests.support.models import CLASSES, FEATURES, make_data, make_engine
from tests.support.ranks import here, run_ranks

WIDTH, LENGTH, DEPTH = 16, 8, 2
NET = 2 * (FEATURES * 16 * 2 + 3 * (16 * 32 * 2 + 16 * 16) + 2 * 16 * 16 + 3 * 16 * CLASSES)
"""Of a sample: the first layer needs no gradient of its input, the frozen one none of its weights."""
TOKEN = DEPTH * 12 * WIDTH * WIDTH + 256 * WIDTH
"""Weights that a token is multiplied with: the blocks', and the tied head's."""
SCORES = 2 * LENGTH * LENGTH * WIDTH
GPT = 6 * TOKEN * LENGTH + DEPTH * 6 * SCORES
"""Of a sample: 6 for each weight and token; attention's two products, and four in backward (masked ones count)."""
AGAIN = 2 * DEPTH * 8 * WIDTH * WIDTH * LENGTH + DEPTH * 2 * SCORES
"""What activation checkpointing computes again: the forward of the blocks, but for the last product of each, whose
output backward does not need."""


def counted(engine, inputs, target):
    """FLOPs of a sample that the hook finds. Attention is made of products: fused on a CPU it has no formula."""
    hook = ThroughputHook()
    with engine, sdpa_kernel(SDPBackend.MATH):
        halfmesh.Trainer(engine).fit([here((inputs, target))] * 2, max_steps=2, hooks=[hook])
    return hook.flops


def counted_gpt(samples, **config):
    def token_loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    ids = torch.randint(0, 256, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    engine = make_engine(config, model=gpt.GPT(LENGTH, WIDTH, DEPTH, 2), criterion=token_loss)
    return counted(engine, ids[:, :-1], ids[:, 1:])


def test_in_one_process():
    """A frozen first layer needs no gradient of its weights; what is computed again counts."""
    model = nn.Sequential(nn.Linear(FEATURES, 5).requires_grad_(False), nn.Linear(5, CLASSES))
    assert counted(make_engine(model=model), *make_data(6)) == 2 * FEATURES * 5 + 2 * 2 * 5 * CLASSES
    assert counted_gpt(3) == GPT
    assert counted_gpt(3, bf16={"mode": "naive"}, activation_checkpoint=True) == GPT + AGAIN


def measured(rank, world_size, cells):
    """FLOPs of a sample: of each cell, of a GPT in a pipeline, and of layers of which one is sharded."""
    found = []
    for layout, mode in cells:
        engine, hook = engine_in_layout(layout, mode, dropout=0.1), ThroughputHook()
        halfmesh.Trainer(engine).fit(max_steps=2, hooks=[hook])
        found.append(hook.flops)
        engine.close()
    found.append(counted_gpt(4, parallel={"pipeline": {"size": 2, "microbatches": 2}}))
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES))
    config = {"parallel": {"tensor": {"size": 2, "plan": {"0": "colwise_gather"}}}}
    return [*found, counted(make_engine(config, model=model), *make_data(6))]


@pytest.mark.distributed
@pytest.mark.sends
def test_every_layout_has_those_of_one_process():
    """To the last operation; a layer that is not sharded counts on each tensor rank."""
    cells = [("dp2", "torch"), ("fsdp", "none"), ("pp2", "none")]
    sharded, alike = 2 * 2 * FEATURES * 6, 2 * 3 * 2 * 6 * CLASSES
    assert run_ranks(measured, 2, cells, timeout=200) == [[*[NET] * len(cells), GPT, sharded + alike]] * 2


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_the_peak_of_a_device(precision, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    matmul = SimpleNamespace(fp32_precision="tf32" if precision == "tf32" else "ieee")
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    peak, device = PEAK_FLOPS["A100"], torch.device("cuda")
    expected = {torch.float32: getattr(peak, precision), torch.bfloat16: peak.half, torch.float64: None}
    assert {dtype: peak_flops(device, dtype) for dtype in expected} == expected
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA RTX A1000")
    assert peak_flops(device, torch.float32) is None
