"""The private names of torch that amp relies on do what it needs. Red: torch changed; look there first."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from halfmesh.amp import _torch
from halfmesh.amp.loss_scaler import LossScaler
from halfmesh.amp.recipe import LossScale


@pytest.mark.parametrize("start", [2.0**16, 1000.1])
@pytest.mark.parametrize(
    ("growth", "backoff", "interval"), [(2.0, 0.5, 1), (2.0, 0.5, 3), (1.1, 0.9, 2), (3.7, 1e-3, 1)]
)
def test_the_scale_moves_as_that_of_grad_scaler(start, growth, backoff, interval):
    """Also where growth would give inf, and the scale stays."""
    options = LossScale(start, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    scaler = LossScaler(options, torch.device("cpu"))
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=start, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for overflows in itertools.islice(itertools.cycle([0, 0, 0, 0, 1, 0, 1, 1, 0]), 40):
        theirs.scale(torch.ones(1))
        param.grad = torch.full((1,), torch.inf if overflows else 0.0)
        theirs.step(optimizer)
        theirs.update()
        scaler.update(torch.tensor(float(overflows)))
        state = scaler.state_dict()
        assert (state["scale"], state["growth_tracker"]) == (
            max(theirs.get_scale(), 2.0**-126),
            theirs._get_growth_tracker(),
        )


def test_step_hooks():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    own = optimizer.register_step_pre_hook(lambda *_: None)
    absent = optimizer.register_step_pre_hook(lambda *_: None)
    absent.remove()
    assert _torch.has_step_hooks(optimizer, besides=absent)
    assert _torch.has_step_pre_hooks(optimizer, besides=absent)
    registers = {
        optimizer.register_step_pre_hook: True,
        optimizer.register_step_post_hook: False,
    }
    for register, before in registers.items():
        assert not _torch.has_step_hooks(optimizer, besides=own)
        handle = register(lambda *_: None)
        assert _torch.has_step_hooks(optimizer, besides=own)
        assert _torch.has_step_pre_hooks(optimizer, besides=own) is before
        handle.remove()
