"""The scope of a trial of user code: nothing is left of what runs in it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from halfmesh.parallel.trial import no_side_effects

CPU = torch.device("cpu")


class Counts(nn.Module):
    """Changes an attribute, a list and buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        return self.norm(x)


def drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_nothing_is_left_of_a_trial():
    model = Counts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with no_side_effects(model.modules(), CPU) as effects:
        assert not model(torch.ones(4, 3)).requires_grad
        assert not effects.drew()
        model.eval()
        drawn()
        assert effects.drew()
    with pytest.raises(ValueError, match="expected 2D"), no_side_effects(model.modules(), CPU):
        model(torch.rand(4))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert (model.training, model.norm.training, model.calls, model.seen) == (True, True, 0, [])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_buffers_that_cannot_be_written_or_are_in_a_graph_stay_as_they_are():
    model = nn.Module()
    model.register_buffer("expanded", torch.ones(1).expand(3))
    with torch.inference_mode():
        model.register_buffer("table", torch.ones(3))
    model.register_buffer("scale", torch.ones(3))
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * model.scale).sum()
    with no_side_effects(model.modules(), CPU):
        model.expanded + model.table + model.scale
    loss.backward()
    assert torch.equal(weight.grad, torch.ones(3))
