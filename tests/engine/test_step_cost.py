"""What a step costs that can be counted: operations of torch, reads by the host. Not seconds."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.updates import CountReads

X, Y = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8)
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_model(depth=3, size=32):
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(size, size), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(size, size))


def by_hand(precision, clip, fused=None):
    """The loop that torch's documentation shows."""
    model, criterion, dtype = make_model(), nn.CrossEntropyLoss(), DTYPES[precision]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = criterion(model(X), Y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()

    return step


def engine_of(model, config):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device="cpu")


def through_engine(precision, clip, mode="torch", **config):
    if precision != "fp32":
        config[precision] = {"mode": mode}
    engine = engine_of(make_model(), {"clip_grad_norm": clip, **config})

    def step():
        engine.zero_grad()
        engine.backward(engine.criterion(engine(X), Y))
        engine.step()

    return step


def count_ops(step, steps=1):
    for _ in range(8):  # the first updates look for mistakes
        step()
    with CountReads() as counter:
        for _ in range(steps):
            step()
    return sum(not op.startswith("profiler.") for op in counter.ops), counter.reads


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("precision", DTYPES)
def test_operations_of_torch(precision, clip):
    """Four more than in the loop by hand with the fused optimizer at most, on tensors of one element."""
    ours, reads = count_ops(through_engine(precision, clip))
    theirs, _ = count_ops(by_hand(precision, clip, fused=True))
    assert ours <= theirs + 4, f"{ours} of {theirs}"
    assert reads == 0


@pytest.mark.parametrize("mode", ["torch", "naive"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_reads_by_the_host(mode, precision, accumulation):
    assert count_ops(through_engine(precision, 1.0, mode, gradient_accumulation=accumulation), steps=8)[1] == 0


def test_memory_of_gradients_is_kept_until_the_next_step():
    """As in a loop by hand: given back between two steps, it would go to the system and come back page by page."""
    engine = engine_of(make_model(), {})
    engine.backward(engine.criterion(engine(X), Y))
    grads = [weakref.ref(param.grad) for param in engine.model.parameters()]
    engine.step()
    assert all(param.grad is None for param in engine.model.parameters())
    assert all(grad() is not None for grad in grads)
    engine.zero_grad()
    assert all(grad() is None for grad in grads)
