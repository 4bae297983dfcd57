"""The scope of a trial of user code: nothing is left of what runs in it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfmesh.parallel.trial import no_side_effects

CPU = torch.device("cpu")


@dataclass
class Table:
    rows: dict[str, Any] = field(default_factory=lambda: {"all": []})
    size: int = 0


class Counts(nn.Module):
    """Changes an attribute, a list, buffers, and a dataclass in a list."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.calls, self.seen, self.tables = 0, [], [(Table(),)]

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.tables[0][0].size += 1
        self.tables[0][0].rows["all"].append(x)
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
    assert model.tables == [(Table(),)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
