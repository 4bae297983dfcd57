"""The throughput hook's operations: those of one process in every layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import halfmesh
from halfmesh.hooks import ThroughputHook
from halfmesh.trainer.throughput import PEAK_FLOPS, peak_flops
from tests.support.checkpoint_runs import make_engine
from tests.support.models import CLASSES, FEATURES, make_data
from tests.support.ranks import here, rank_device, run_ranks

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


def make_gpt():
    from gpt import GPT

    return GPT(LENGTH, WIDTH, DEPTH, 2)


def engine_of(model, criterion=nn.functional.cross_entropy, **config):
    params = [param for param in model.parameters() if param.requires_grad]
    return halfmesh.initialize(model, torch.optim.SGD(params, lr=0.1), criterion, config=config, device=rank_device())


def counted(engine, inputs, target):
    """FLOPs of a sample that the hook finds. Attention is made of products: fused on a CPU it has no formula."""
    hook = ThroughputHook()
    with sdpa_kernel(SDPBackend.MATH):
        halfmesh.Trainer(engine).fit([here((inputs, target))] * 2, max_steps=2, hooks=[hook])
    return hook.flops


def text(samples):
    ids = torch.randint(0, 256, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def token_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_layers():
    """A frozen first layer needs no gradient of its weights."""
    model = nn.Sequential(nn.Linear(FEATURES, 5).requires_grad_(False), nn.Linear(5, CLASSES))
    assert counted(engine_of(model), *make_data(6)) == 2 * FEATURES * 5 + 2 * 2 * 5 * CLASSES


@pytest.mark.parametrize(
    ("config", "expected"), [({}, GPT), ({"bf16": {"mode": "naive"}, "activation_checkpoint": True}, GPT + AGAIN)]
)
def test_a_transformer(config, expected):
    """What is computed again counts."""
    assert counted(engine_of(make_gpt(), token_loss, **config), *text(3)) == expected


def measured(rank, world_size, cells):
    """FLOPs of a sample: of each cell, of a GPT in a pipeline, and of layers of which one is sharded."""
    found = []
    for layout, mode in cells:
        engine, hook = make_engine(layout, mode, dropout=0.1), ThroughputHook()
        halfmesh.Trainer(engine).fit(max_steps=2, hooks=[hook])
        found.append(hook.flops)
        engine.close()
    engine = engine_of(make_gpt(), token_loss, parallel={"pipeline": {"size": world_size, "microbatches": 2}})
    found.append(counted(engine, *text(4)))
    engine.close()
    plan = {"0": "colwise_gather"}
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES))
    engine = engine_of(model, parallel={"tensor": {"size": 2, "plan": plan}})
    found.append(counted(engine, *make_data(6)))
    engine.close()
    return found


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
    assert peak_flops(device, torch.float32) == getattr(peak, precision)
    assert peak_flops(device, torch.bfloat16) == peak.half
    assert peak_flops(device, torch.float64) is None
