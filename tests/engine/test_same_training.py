"""Training is that of the loop by hand: bit for bit where nothing has to be rounded otherwise, 1e-6 elsewhere."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from tests.support.models import MLP, make_data, make_engine, step_on

STEPS = 4
X, Y = make_data(12 * STEPS)
BATCHES = list(zip(X.split(6), Y.split(6), strict=True))
SCALE = {"init_scale": 2.0**10, "growth_interval": 3}
MODES = {None: {}, torch.bfloat16: {"bf16": {"mode": "torch"}}, torch.float16: {"fp16": {"mode": "torch", **SCALE}}}
WIDE, BITES = 1e6, 0.3
"""A norm that no gradient has, and one that all have."""
OPTIMIZERS = [
    partial(optim.AdamW, lr=0.01, weight_decay=0.1, fused=True),
    partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3),
    partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
]


@pytest.mark.parametrize(
    ("dtype", "clip", "accumulation"),
    [
        (None, 0.0, 1),
        (torch.bfloat16, WIDE, 1),
        (torch.float16, 0.0, 1),
        (torch.float16, WIDE, 2),  # loss scale and cycle are powers of two
        (None, BITES, 1),
        (torch.float16, BITES, 2),
    ],
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_it_is_that_of_the_loop_by_hand(make, dtype, clip, accumulation):
    config = {"clip_grad_norm": clip, "gradient_accumulation": accumulation, **MODES[dtype]}
    engine, model = make_engine(config, optimizer=make), MLP()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, **SCALE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in BATCHES[step * accumulation : (step + 1) * accumulation]:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss / accumulation).backward()
            step_on(engine, x, y)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    assert engine.skipped_steps == 0
    engine.close()
    close = 1e-6 if clip == BITES else 0  # one division in place of several: other last bits
    torch.testing.assert_close(dict(engine.model.state_dict()), dict(model.state_dict()), rtol=close, atol=close)
