"""What a step costs that can be counted: calls of Python, operations of torch, reads by the host. Not seconds."""

from __future__ import annotations

import cProfile
import pstats
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


def count_calls(step, steps=20):
    for _ in range(5):
        step()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    return pstats.Stats(profile).total_calls / steps


def count_ops(step, steps=1):
    for _ in range(4):
        step()
    with CountReads() as counter:
        for _ in range(steps):
            step()
    return sum(not op.startswith("profiler.") for op in counter.ops), counter.reads


@pytest.mark.parametrize(
    ("precision", "clip", "share"),
    [("fp32", 0.0, 1.01), ("bf16", 0.0, 1.15), ("fp16", 0.0, 1.2), ("fp16", 1.0, 0.82)],
)
def test_calls_of_python(precision, clip, share):
    """As a share of those of the loop by hand; nothing that is added to a step may go unnoticed.

    The limits leave room for a few calls. They are those of a plain path: nothing is remembered from one step to the
    next to save calls, which only models of this size would notice.
    """
    ours, theirs = count_calls(through_engine(precision, clip)), count_calls(by_hand(precision, clip))
    assert ours <= share * theirs, f"{ours:.0f} of {theirs:.0f}"


def update_calls(mode, depth):
    """Calls of `engine.step` alone: the fewest, as a collection of garbage may call hooks."""
    engine = engine_of(make_model(depth, 4), {"fp16": {"mode": mode}, "clip_grad_norm": 1.0})
    counts = []
    for _ in range(9):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(X[:, :4]), Y % 4))
        profile = cProfile.Profile()
        profile.enable()
        engine.step()
        profile.disable()
        counts.append(pstats.Stats(profile).total_calls)
    return min(counts[3:])


@pytest.mark.parametrize(("mode", "calls"), [("torch", 12), ("naive", 24)])
def test_an_update_calls_little_for_each_tensor(mode, calls):
    """A part of them is torch's own, in the optimizer's step."""
    assert update_calls(mode, 13) - update_calls(mode, 3) <= calls * 2 * (13 - 3) * 2


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
