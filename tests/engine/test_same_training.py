"""Training is that of the loop by hand: bit for bit where nothing has to be rounded otherwise, 1e-6 elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import halfmesh
from tests.support.updates import OPTIMIZERS

STEPS = 4
BATCHES = [
    (torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)), torch.arange(6) % 4) for seed in range(2 * STEPS)
]
SCALE = {"init_scale": 2.0**10, "growth_interval": 3}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"mode": "torch"}}, "fp16": {"fp16": {"mode": "torch", **SCALE}}}
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDE, BITES = 1e6, 0.3
"""A norm that no gradient has, and one that all have."""
CASES = [
    ("fp32", 0.0, 1),
    ("bf16", WIDE, 1),
    ("fp16", 0.0, 1),
    ("fp16", WIDE, 2),
    ("fp32", BITES, 1),
    ("fp16", BITES, 2),
]
"""Precision, clipping, accumulation: loss scale and cycle are powers of two."""


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
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", **SCALE)
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
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(("precision", "clip", "accumulation"), CASES)
@pytest.mark.parametrize("name", ["sgd_dampening", "adam_foreach", "adamw", "rmsprop"])
def test_it_is_that_of_the_loop_by_hand(name, precision, clip, accumulation):
    model = make_model()
    config = {"clip_grad_norm": clip, "gradient_accumulation": accumulation, **PRECISIONS[precision]}
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
    expected_losses, expected = by_hand(name, precision, clip, accumulation)
    close = 1e-6 if clip == BITES else 0  # one division in place of several: other last bits
    assert close or losses == expected_losses
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=close, atol=close)
