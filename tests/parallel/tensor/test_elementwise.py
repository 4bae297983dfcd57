"""What optimizers step by: elements, or whole parameters; found by trying, which leaves no trace."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
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
    """Steps with what `change` makes of weight, gradient, the number of the step and the group."""

    def step(self, closure=None):
        for group in self.param_groups:
            if "moves" in group:
                group["moves"].add_(1)
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                param.data.sub_(self.change(param.detach(), param.grad, state["step"], group), alpha=group["lr"])


def own(change):
    """An optimizer class."""
    return type("Whole", (Own,), {"change": lambda self, *given: change(*given)})


def groups(params):
    """Of which the second is stepped as a whole."""
    given = [{"params": [param], "whole": bool(index)} for index, param in enumerate(params)]
    return own(lambda param, grad, step, group: grad / (grad.norm() if group["whole"] else 1.0))(given)


def timm(params, opt, **options):
    pytest.importorskip("timm")
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(params, opt=opt, lr=0.01, **options)


def lamb(params, **options):
    return pytest.importorskip("timm.optim").Lamb(params, **options)


class Counting(optim.Optimizer):
    """Steps another optimizer, and counts in its groups, as Lookahead does."""

    def __init__(self, params, make):
        inner = make(params)
        super().__init__(inner.param_groups, {"count": 0})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            group["count"] += 1


ELEMENT = {
    **OPTIMIZERS,
    "fused, its rate a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(0.01), fused=True),
    "a rate of 0": lambda params: optim.AdamW(params, lr=0.0),
    "over another": partial(Counting, make=optim.AdamW),
    **{name: partial(timm, opt=name) for name in ("lion", "nadamw")},
}
MATRIX = {
    "norm": own(lambda param, grad, *_: grad / grad.norm()),
    "rows": own(lambda param, grad, *_: grad / grad.norm(dim=-1, keepdim=True)),
    "columns": own(lambda param, grad, *_: grad / grad.norm(dim=0, keepdim=True)),
    "shape": own(lambda param, grad, *_: grad / param.shape[0] ** 0.5),
    "trust ratio, as LARS": own(lambda param, grad, *_: grad * param.norm() / grad.norm()),
    "large ones only": own(lambda param, grad, *_: grad / (grad.norm() if min(param.shape) >= 128 else 1.0)),
    "from the second step on": own(lambda param, grad, step, _: grad / (grad.norm() if step > 1 else 1.0)),
    "in one group of many": groups,
    "Adafactor": optim.Adafactor,
    "LAMB": partial(lamb, max_grad_norm=None),
    "Muon": lambda params: optim.Muon(params[:1]),
    **{name: partial(timm, opt=name) for name in ("adafactorbv", "muon", "adamp", "sgdp", "novograd", "cadopt")},
}


@pytest.mark.parametrize("unit", ["element", "matrix"])
def test_units_of_optimizers(unit):
    for name, make in (ELEMENT if unit == "element" else MATRIX).items():
        optimizer = make(make_params())
        if optimizer.state:  # this torch gives it state when it is built, which a trial lacks
            continue
        assert find_unit(optimizer) == unit, name
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


class OfAll(optim.SGD):
    """Clips by the norm of all of its gradients, as LAMB does."""

    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.stack([param.grad.norm() for param in group["params"]]).norm()
            for param in group["params"]:
                param.data.sub_(param.grad / norm.clamp(min=1.0), alpha=group["lr"])


class Quantised(optim.SGD):
    """Takes its learning rate as a tensor, as torchao's do, and keeps quantised state."""

    def step(self, closure=None):
        from torchao.optim.subclass_8bit import OptimState8bit

        for group in self.param_groups:
            group["lr"].fill_(0.1)
            for param in group["params"]:
                param.data -= param.grad * group["lr"]
                self.state[param]["exp_avg"] = OptimState8bit.zeros(param.shape, block_size=128)


REJECTED = {
    r"OfAll steps each parameter with values from others .*; otherwise": OfAll,
    r"Lamb steps each parameter with values from others .*LAMB's max_grad_norm": lamb,
    "could not test on a matrix whether LBFGS .* LBFGS.unit = 'matrix' if": optim.LBFGS,
    "could not test on a matrix whether SparseAdam .* SparseAdam.unit = 'matrix' if": optim.SparseAdam,
    "Counting steps Whole, which needs whole parameters": partial(Counting, make=MATRIX["norm"]),
    "it keeps 'exp_avg' as a OptimState8bit, in blocks that": partial(Quantised, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("words", REJECTED)
def test_what_fits_no_unit_is_rejected(words):
    if "OptimState8bit" in words:
        pytest.importorskip("torchao")
    with pytest.raises(InputError, match=words):
        find_unit(REJECTED[words](make_params()))


def test_the_optimizer_given_is_not_touched():
    params = make_params()
    optimizer = optim.AdamW([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], lr=0.01, weight_decay=0.1)
    ran: list[str] = []
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    ran.clear()
    before = copy.deepcopy((optimizer.state_dict(), params))
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with torch.no_grad():
        assert find_unit(optimizer) == "element"
    assert ran == []
    torch.testing.assert_close((optimizer.state_dict(), params), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]
    assert all(torch.equal(param.grad, torch.ones_like(param)) for param in params)


def test_a_counter_that_a_group_keeps_as_a_tensor_is_not_moved():
    """As of timm's LAMB: also two trials begin at the same count."""
    make = own(lambda param, grad, step, group: grad / grad.norm() * group["moves"])
    optimizer = make([{"params": make_params(), "moves": torch.tensor(2.0)}])
    assert find_unit(optimizer) == "matrix"
    assert optimizer.param_groups[0]["moves"] == 2.0
