"""Operations of torch, reads by the host and calls of Python in a step, beside the loop by hand."""

from __future__ import annotations

import cProfile
import gc
import pstats

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.models import adamw, linear_engine

X, Y = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8)
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class CountReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Operations, and reads of device scalars by the host."""

    def __init__(self):
        super().__init__()
        self.reads, self.ops = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 32))


def by_hand(precision, clip):
    """The loop that torch's documentation shows, with the fused optimizer."""
    model, criterion, dtype = make_model(), nn.CrossEntropyLoss(), DTYPES[precision]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
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


def through_engine(precision, clip, mode="torch", **config):
    config |= {"clip_grad_norm": clip} | ({} if precision == "fp32" else {precision: {"mode": mode}})
    engine = halfmesh.initialize(make_model(), adamw, nn.CrossEntropyLoss(), config=config, device="cpu")

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
    """Four more than in the loop by hand at most, on tensors of one element."""
    ours, reads = count_ops(through_engine(precision, clip))
    theirs, _ = count_ops(by_hand(precision, clip))
    assert ours <= theirs + 4, f"{ours} of {theirs}"
    assert reads == 0


@pytest.mark.parametrize("mode", ["torch", "naive"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_reads_by_the_host(mode, precision, accumulation):
    assert count_ops(through_engine(precision, 1.0, mode, gradient_accumulation=accumulation), steps=8)[1] == 0


# -- what the Trainer adds to the loop ---------------------------------------------------------------------------------


def loop(engine):
    """With the sum that a user prints."""
    total = torch.zeros(())
    for x, y in engine.dataloader:
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        total += loss.detach()


def fit(engine):
    halfmesh.Trainer(engine, log_every=1000).fit(epochs=engine.dataloader.next_epoch + 1)


def cost(run, engine):
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


def per_step(run):
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
