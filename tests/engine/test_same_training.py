"""Training is that of the loop by hand: bit for bit where nothing has to be rounded otherwise, 1e-6 elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import halfmesh
from tests.support.updates import OPTIMIZERS

STEPS = 6
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = [
    (torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)), torch.arange(6) % 4) for seed in range(2 * STEPS)
]
WIDE, BITES = 1e6, 0.3
"""A norm that no gradient has, and one that all have."""
CASES = [("fp32", 0.0, 1), ("bf16", WIDE, 1), ("fp16", 0.0, 1), ("fp16", WIDE, 2)]
"""Precision, clipping, accumulation."""


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


def by_hand(name, precision, clip, accumulation):
    """With fused=True where halfmesh chooses that."""
    model, criterion, dtype = make_model(), nn.CrossEntropyLoss(), DTYPES[precision]
    optimizer = OPTIMIZERS[name](model.parameters())
    for group in optimizer.param_groups:
        left_open = group.get("fused", 0) is None and group.get("foreach") is None
        if left_open and type(optimizer) in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad):
            group["fused"] = not (group.get("momentum") and group.get("dampening"))
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=2.0**10, growth_interval=3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in BATCHES[step * accumulation : (step + 1) * accumulation]:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = criterion(model(x), y)
            scaler.scale(loss / accumulation).backward()
            losses.append(loss.item())
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return losses, [p.detach() for p in model.parameters()]


def through_engine(name, precision, clip, accumulation):
    model = make_model()
    config = {"clip_grad_norm": clip, "gradient_accumulation": accumulation}
    if precision != "fp32":
        config[precision] = {"mode": "torch"}
    if precision == "fp16":
        config[precision] |= {"init_scale": 2.0**10, "growth_interval": 3}
    optimizer = OPTIMIZERS[name](model.parameters())
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device="cpu")
    losses = []
    for x, y in BATCHES[: STEPS * accumulation]:
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.skipped_steps == 0
    engine.close()
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("precision", "clip", "accumulation"), CASES)
def test_bit_for_bit(name, precision, clip, accumulation):
    """Clipping does not bite; loss scale and cycle are powers of two."""
    losses, weights = through_engine(name, precision, clip, accumulation)
    expected_losses, expected = by_hand(name, precision, clip, accumulation)
    assert losses == expected_losses
    for ours, theirs in zip(weights, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("fp16", 2)])
def test_where_clipping_bites(name, precision, accumulation):
    """One division in place of several: other last bits."""
    _, weights = through_engine(name, precision, BITES, accumulation)
    _, expected = by_hand(name, precision, BITES, accumulation)
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
