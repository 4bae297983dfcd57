"""What optimizers step by: elements, or whole parameters; found by trying, which leaves no trace."""

from __future__ import annotations

import copy
import random

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


MORE = {
    "fused_tensor_lr": lambda params: optim.AdamW(params, lr=torch.tensor(0.01), fused=True),
    "lr_0": lambda params: optim.AdamW(params, lr=0.0),
}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
def test_elementwise_ones_pass(name):
    optimizer = {**OPTIMIZERS, **MORE}[name](make_params())
    if optimizer.state:
        pytest.skip("this torch gives it state when it is built, which a trial lacks; of torch's own it is not asked")
    assert find_unit(optimizer) == "element"
    optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step
    assert find_unit(optimizer) == "element"


class Own(optim.SGD):
    """Steps with what `change` makes of weight, gradient and the number of the step."""

    def change(self, param: torch.Tensor, step: int) -> torch.Tensor:
        raise NotImplementedError

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                param.data.sub_(self.change(param.detach(), param.grad, state["step"]), alpha=group["lr"])


def own(change):
    """An optimizer class."""
    return type("Whole", (Own,), {"change": lambda self, *given: change(*given)})


WHOLE = {
    "norm": own(lambda param, grad, step: grad / grad.norm()),
    "rows": own(lambda param, grad, step: grad / grad.norm(dim=1, keepdim=True)),
    "columns": own(lambda param, grad, step: grad / grad.norm(dim=0, keepdim=True)),
    "shape": own(lambda param, grad, step: grad / param.shape[0] ** 0.5),
    "trust ratio, as LARS": own(lambda param, grad, step: grad * param.norm() / grad.norm()),
    "large ones only": own(lambda param, grad, step: grad / (grad.norm() if min(param.shape) >= 128 else 1.0)),
    "from the second step on": own(lambda param, grad, step: grad / (grad.norm() if step > 1 else 1.0)),
    "Adafactor": optim.Adafactor,
    "Muon": lambda params, lr: optim.Muon(params[:1], lr=lr),
}


@pytest.mark.parametrize("name", WHOLE)
def test_those_that_look_at_a_whole_parameter_are_found(name):
    assert find_unit(WHOLE[name](make_params(), lr=0.1)) == "matrix"


def test_one_group_of_many_is_enough():
    class Mixed(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    scale = param.grad.norm() if group["normalizes"] else 1.0
                    param.data.sub_(param.grad / scale, alpha=group["lr"])

    groups = [{"params": [param], "normalizes": bool(index)} for index, param in enumerate(make_params())]
    assert find_unit(Mixed(groups, lr=0.1)) == "matrix"
    groups[1]["normalizes"] = False
    assert find_unit(Mixed(groups, lr=0.1)) == "element"


def test_an_optimizer_may_declare_its_unit():
    optimizer = WHOLE["norm"](make_params(), lr=0.1)
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


def test_one_that_looks_at_several_parameters_is_refused():
    with pytest.raises(InputError, match=r"OfAll steps a parameter by what it reads of others .* clip_grad_norm; else"):
        find_unit(OfAll(make_params(), lr=0.1))


def test_what_cannot_be_tried():
    for make in (optim.LBFGS, optim.SparseAdam):
        with pytest.raises(
            InputError,
            match=f"could not test on a matrix whether {make.__name__} .* {make.__name__}.unit = 'matrix' if",
        ):
            find_unit(make(make_params()))


TIMM = {
    **dict.fromkeys(("adafactorbv", "adafactor", "lars", "muon", "adamp", "sgdp", "novograd", "cadopt"), "matrix"),
    **dict.fromkeys(("lion", "nadamw"), "element"),
}


@pytest.mark.parametrize("name", TIMM)
def test_optimizers_of_timm(name):
    timm_optim = pytest.importorskip("timm.optim")
    assert find_unit(timm_optim.create_optimizer_v2(nn.Linear(4, 4), opt=name, lr=0.01)) == TIMM[name]


def test_lamb_clips_by_the_norm_of_all():
    lamb = pytest.importorskip("timm.optim").Lamb
    assert find_unit(lamb(make_params(), max_grad_norm=None)) == "matrix"
    with pytest.raises(InputError, match=r"Lamb steps a parameter by what it reads of others .*LAMB's max_grad_norm"):
        find_unit(lamb(make_params()))


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

    class Warming(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"].add_(1)
                for param in group["params"]:
                    param.data.sub_(param.grad / param.grad.norm() * group["count"], alpha=group["lr"])

    optimizer = Warming([{"params": make_params(), "count": torch.tensor(2.0)}], lr=0.1)
    assert find_unit(optimizer) == "matrix"
    assert optimizer.param_groups[0]["count"] == 2.0


class Counting(optim.Optimizer):
    """Steps another optimizer, and counts in its groups, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {"count": 0})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            group["count"] += 1


def test_of_an_optimizer_over_another_the_inner_one_is_tried():
    plain, whole = (Counting(kind(make_params(), lr=0.1)) for kind in (optim.AdamW, WHOLE["norm"]))
    assert find_unit(plain) == "element"
    with pytest.raises(InputError, match=r"Counting steps Whole, which steps a parameter as a whole"):
        find_unit(whole)
    assert {group["count"] for each in (plain, whole) for group in each.param_groups} == {0}


class Quantised(optim.SGD):
    """Takes its learning rate as a tensor, as torchao's do, and keeps quantised state."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"].fill_(0.1)
            for param in group["params"]:
                param.data -= param.grad * group["lr"]
                from torchao.optim.subclass_8bit import OptimState8bit

                self.state[param]["exp_avg"] = OptimState8bit.zeros(param.shape, block_size=128)


def test_state_in_blocks_is_refused_by_name():
    pytest.importorskip("torchao")
    with pytest.raises(InputError, match=r"it keeps 'exp_avg' as a OptimState8bit, in blocks that shards would cut"):
        find_unit(Quantised(make_params(), lr=torch.tensor(0.01)))
