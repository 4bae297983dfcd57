"""Two losses under O0 to O3: an exact resume after one of them overflowed, and nothing saved in half precision."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn, optim

from tests.support.apex_runs import LEVELS, apex_config
from tests.support.checkpoint_runs import differing, whole_state
from tests.support.models import FEATURES, MLP, make_engine, make_loader

HUGE = 1e38


def start(opt_level, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), MLP(seed=seed, dropout=0.2))
    config = {"fp16": apex_config(opt_level, loss_scale="dynamic", num_losses=2)}
    adam = optim.Adam(model.parameters(), lr=0.01, eps=1e-3)  # 1e-8 is zero in O3's fp16
    return make_engine(config, model=model, optimizer=adam, loader=make_loader(32, 8, shuffle=True))


def train(engine, epochs, huge=None):
    """Two losses of the same outputs; `huge`: the one that overflows in the first step of each epoch.

    Returns all that can be seen: losses, what the steps return, the scales.
    """
    seen = []
    for _ in range(epochs):
        for batch, (x, y) in enumerate(engine.dataloader):
            output = engine(x)
            losses = [engine.criterion(output, y), output.float().square().mean()]
            for i, loss in enumerate(losses):
                factor = HUGE if batch == 0 and i == huge else 1.0
                engine.backward(loss * factor, loss_id=i, retain_graph=i == 0)
            seen.append(([loss.item() for loss in losses], repr(engine.step()), engine.loss_scales))
    return seen


@pytest.mark.parametrize("opt_level", LEVELS)
def test_resume_is_bitwise(opt_level):
    engine, file = start(opt_level, 0), io.BytesIO()
    train(engine, epochs=1, huge=1)
    train(engine, epochs=1)
    state = engine.state_dict()
    assert {value.dtype for value in state["model"].values()} == {torch.float32, torch.int64}
    torch.save(state, file)
    expected = train(engine, epochs=3)
    other = start(opt_level, 1)
    train(other, epochs=1, huge=0)  # state of its own, to be overwritten
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert train(other, epochs=3) == expected
    assert differing(whole_state(other), whole_state(engine)) == []
