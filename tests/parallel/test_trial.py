"""Trials of user code, which leave no trace; and what they find: the units that optimizers step by."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from halfmesh.errors import InputError
from halfmesh.parallel.trial import find_unit, no_side_effects
from tests.support.updates import OPTIMIZERS

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


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_nothing_is_left_of_a_trial():
    model = Counts()
    before, states = copy.deepcopy(model.state_dict()), random_states()
    with no_side_effects(model.modules(), CPU) as effects:
        assert not model(torch.ones(4, 3)).requires_grad
        assert not effects.drew()
        model.eval()
        torch.rand(())
        assert effects.drew()
    with pytest.raises(ValueError, match="expected 2D"), no_side_effects(model.modules(), CPU):
        model(torch.rand(4))
    assert random_states() == states
    assert (model.training, model.norm.training, model.calls, model.seen) == (True, True, 0, [])
    assert model.tables == [(Table(),)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def make_params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(5))]


class Own(optim.SGD):
    """Steps with what `change` makes of weight and gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(self.change(param.detach(), param.grad), alpha=group["lr"])


def own(change):
    """An optimizer class."""
    return type("Whole", (Own,), {"change": lambda self, *given: change(*given)})


def timm(params, name, **options):
    return getattr(pytest.importorskip("timm.optim"), name)(params, **options)


UNITS = {
    "element": {**OPTIMIZERS, "a rate of 0": lambda params: optim.AdamW(params, lr=0.0)},
    "matrix": {
        "norm": own(lambda param, grad: grad / grad.norm()),
        "columns": own(lambda param, grad: grad / grad.norm(dim=0, keepdim=True)),
        "shape": own(lambda param, grad: grad / param.shape[0] ** 0.5),
        "trust ratio, as LARS": own(lambda param, grad: grad * param.norm() / grad.norm()),
        "large ones only": own(lambda param, grad: grad / (grad.norm() if min(param.shape) >= 128 else 1.0)),
        **{name: partial(timm, name=name, lr=0.1) for name in ("Lars", "SGDP")},
        "LAMB": partial(timm, name="Lamb", max_grad_norm=None),
        "Muon": lambda params: optim.Muon(params[:1]),
    },
}


@pytest.mark.parametrize("unit", UNITS)
def test_units_of_optimizers(unit):
    for name, make in UNITS[unit].items():
        optimizer = make(make_params())
        if optimizer.state:  # this torch gives it state when it is built, which a trial lacks
            continue
        optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step
        assert find_unit(optimizer) == unit, name


def test_an_optimizer_may_declare_its_unit():
    optimizer = UNITS["matrix"]["norm"](make_params())
    for unit, found in (("element", "element"), ("row", "matrix"), ("matrix", "matrix")):
        optimizer.unit = unit
        assert find_unit(optimizer) == found
    optimizer.unit = "column"
    with pytest.raises(InputError, match=r"Whole has unit='column'; allowed: 'element', 'row', 'matrix'"):
        find_unit(optimizer)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(timm, name="Lamb"), r"Lamb steps each parameter with values from others.*LAMB's max_grad_norm"),
        (optim.LBFGS, "could not test on a matrix whether LBFGS .* LBFGS.unit = 'matrix' if"),
    ],
)
def test_what_fits_no_unit_is_rejected(make, words):
    with pytest.raises(InputError, match=words):
        find_unit(make(make_params()))


def test_the_optimizer_given_is_not_touched():
    params = make_params()
    optimizer = optim.AdamW([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], lr=0.01, weight_decay=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before, states = copy.deepcopy((optimizer.state_dict(), params)), random_states()
    with torch.no_grad():
        assert find_unit(optimizer) == "element"
    torch.testing.assert_close((optimizer.state_dict(), params), before, rtol=0, atol=0)
    assert random_states() == states
    assert all(torch.equal(param.grad, torch.ones_like(param)) for param in params)
