"""What optimizers step by: elements, or whole parameters; found by trying, which leaves no trace."""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest
import torch
from torch import nn, optim

from halfmesh.errors import InputError
from halfmesh.parallel.trial import find_unit
from tests.support.updates import OPTIMIZERS


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


ELEMENT = {
    **OPTIMIZERS,
    "its rate a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(0.01)),
    "a rate of 0": lambda params: optim.AdamW(params, lr=0.0),
    "Lion": partial(timm, name="Lion"),
}
MATRIX = {
    "norm": own(lambda param, grad: grad / grad.norm()),
    "columns": own(lambda param, grad: grad / grad.norm(dim=0, keepdim=True)),
    "shape": own(lambda param, grad: grad / param.shape[0] ** 0.5),
    "trust ratio, as LARS": own(lambda param, grad: grad * param.norm() / grad.norm()),
    "large ones only": own(lambda param, grad: grad / (grad.norm() if min(param.shape) >= 128 else 1.0)),
    "LAMB": partial(timm, name="Lamb", max_grad_norm=None),
    "Muon": lambda params: optim.Muon(params[:1]),
    "AdamP": partial(timm, name="AdamP"),
}


@pytest.mark.parametrize("unit", ["element", "matrix"])
def test_units_of_optimizers(unit):
    for name, make in (ELEMENT if unit == "element" else MATRIX).items():
        optimizer = make(make_params())
        if optimizer.state:  # this torch gives it state when it is built, which a trial lacks
            continue
        optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step
        assert find_unit(optimizer) == unit, name


def test_an_optimizer_may_declare_its_unit():
    optimizer = MATRIX["norm"](make_params())
    for unit, found in (("element", "element"), ("row", "matrix"), ("matrix", "matrix")):
        optimizer.unit = unit
        assert find_unit(optimizer) == found
    optimizer.unit = "column"
    with pytest.raises(InputError, match=r"Whole has unit='column'; allowed: 'element', 'row', 'matrix'"):
        find_unit(optimizer)


REJECTED = {
    r"Lamb steps each parameter with values from others.*LAMB's max_grad_norm": partial(timm, name="Lamb"),
    "could not test on a matrix whether LBFGS .* LBFGS.unit = 'matrix' if": optim.LBFGS,
}


@pytest.mark.parametrize("words", REJECTED)
def test_what_fits_no_unit_is_rejected(words):
    with pytest.raises(InputError, match=words):
        find_unit(REJECTED[words](make_params()))


def test_the_optimizer_given_is_not_touched():
    params = make_params()
    optimizer = optim.AdamW([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], lr=0.01, weight_decay=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = copy.deepcopy((optimizer.state_dict(), params)), torch.get_rng_state(), random.getstate()
    with torch.no_grad():
        assert find_unit(optimizer) == "element"
    torch.testing.assert_close((optimizer.state_dict(), params), before[0], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert all(torch.equal(param.grad, torch.ones_like(param)) for param in params)
