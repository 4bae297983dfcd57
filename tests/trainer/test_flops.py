"""The throughput hook's operations: those of one process in every layout; nothing of the run changes."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import halfmesh
from halfmesh.hooks import ThroughputHook
from tests.support.checkpoint_runs import differing, make_engine, whole_state
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


def layers(first=nn.Linear):
    return nn.Sequential(first(FEATURES, 5), nn.Linear(5, CLASSES))


def frozen(*sizes):
    return nn.Linear(*sizes).requires_grad_(False)


FIRST, SECOND = 2 * FEATURES * 5, 2 * 5 * CLASSES


@pytest.mark.parametrize(
    ("model", "samples", "expected"),
    [
        (layers(), make_data(6), 2 * FIRST + 3 * SECOND),
        (layers(), (make_data(6)[0].requires_grad_(), make_data(6)[1]), 3 * FIRST + 3 * SECOND),
        (layers(frozen), make_data(6), FIRST + 2 * SECOND),
    ],
    ids=["layers", "inputs with gradient", "frozen"],
)
def test_layers(model, samples, expected):
    assert counted(engine_of(model), *samples) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, GPT),
        ({"bf16": {"mode": "naive"}, "activation_checkpoint": True}, GPT + AGAIN),
        pytest.param({"compile": {"backend": "aot_eager"}}, GPT, marks=pytest.mark.slow),
    ],
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
    engine = engine_of(
        nn.Sequential(nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)), parallel={"tensor": {"size": 2, "plan": plan}}
    )
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


def with_and_without(rank, world_size, cells):
    """What differs, with dropout, BatchNorm and accumulation, in a run with counts or a precision report."""
    found = []
    for layout, mode in cells:
        states = []
        for measures in ("nothing", "throughput", "precision"):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(3)
            engine = make_engine(layout, mode, dropout=0.1, gradient_accumulation=2)
            with engine.precision_report() if measures == "precision" else nullcontext():
                halfmesh.Trainer(engine).fit(max_steps=3, hooks=["throughput"] * (measures == "throughput"))
            states.append(whole_state(engine))
        found += differing(states[1], states[0]) + differing(states[2], states[0])
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_training_is_the_same_to_the_bit():
    assert with_and_without(0, 1, [("one", "torch")]) == []
    assert run_ranks(with_and_without, 2, [("pp2", "naive"), ("fsdp", "none")], timeout=120) == [[]] * 2
