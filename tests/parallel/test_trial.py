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


def test_nothing_is_left_of_a_trial():
    model = Counts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with no_side_effects(model.modules(), CPU) as effects:
        assert not model(torch.ones(4, 3)).requires_grad
        assert not effects.drew()
        model.eval()
        torch.rand(())
        assert effects.drew()
    with pytest.raises(ValueError, match="expected 2D"), no_side_effects(model.modules(), CPU):
        model(torch.rand(4))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert (model.training, model.norm.training, model.calls, model.seen) == (True, True, 0, [])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
