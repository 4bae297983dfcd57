"""Operations of torch, reads by the host and calls of Python in a step, beside the loop by hand."""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.models import linear_engine
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


# -- what the Trainer adds to the loop ---------------------------------------------------------------------------------


def loop(engine: Any) -> None:
    """With the sum that a user prints."""
    total = torch.zeros(())
    for x, y in engine.dataloader:
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        total += loss.detach()


def fit(engine: Any) -> None:
    halfmesh.Trainer(engine, log_every=1000).fit(epochs=engine.dataloader.next_epoch + 1)


def cost(run: Callable[[Any], None], engine: Any) -> tuple[int, int, int]:
    """Calls of Python; and, of another epoch, operations and reads."""
    profile = cProfile.Profile()
    gc.collect()
    gc.disable()  # finalizers of earlier tests are no calls of this step
    profile.enable()
    run(engine)
    profile.disable()
    gc.enable()
    with CountReads() as counter:
        run(engine)
    return pstats.Stats(profile).total_calls, len(counter.ops), counter.reads


def per_step(run: Callable[[Any], None]) -> list[float]:
    """Of 40 more batches."""
    found = []
    for batches in (10, 50):
        engine = linear_engine({"bf16": {"mode": "torch"}}, samples=4 * batches, evaluated=0)
        run(engine)
        found.append(cost(run, engine))
    return [(more - fewer) / 40 for fewer, more in zip(*found, strict=True)]


def test_what_the_trainer_adds_to_a_step():
    (calls, operations, reads), (of_loop, operations_of_loop, reads_of_loop) = per_step(fit), per_step(loop)
    assert calls - of_loop <= 22
    assert operations <= operations_of_loop
    assert reads == reads_of_loop
