"""Which optimizers may step parts of a parameter, and that trying it leaves no trace."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn, optim

from halfmesh.parallel.elementwise import find_problem
from tests.support.updates import OPTIMIZERS


def make_params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(5))]


MORE = {
    "adam_fused": lambda params: optim.Adam(params, fused=True),
    "adamw_capturable": lambda params: optim.AdamW(params, capturable=True),
    "sgd_fused": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adagrad_fused": lambda params: optim.Adagrad(params, fused=True),
    "fused_tensor_lr": lambda params: optim.AdamW(params, lr=torch.tensor(0.01), fused=True),
    "sgd_maximize": lambda params: optim.SGD(params, lr=0.1, maximize=True),
    "lr_0": lambda params: optim.AdamW(params, lr=0.0),
}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
def test_elementwise_ones_pass(name):
    assert find_problem({**OPTIMIZERS, **MORE}[name](make_params())) is None


class Normalized(optim.SGD):
    """Divides each gradient by its norm."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class ByRows(Normalized):
    """Looks at rows, which stay whole when columns are not divided."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / param.grad.norm(dim=1, keepdim=True), alpha=group["lr"])


class ByColumns(Normalized):
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / param.grad.norm(dim=0, keepdim=True), alpha=group["lr"])


class ByShape(Normalized):
    """Another learning rate for another number of rows."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=group["lr"] / param.shape[0] ** 0.5)


class Trusting(Normalized):
    """LARS: the ratio of the norms of weights and gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad * (param.norm() / param.grad.norm()).detach(), alpha=group["lr"])


class OnceLarge(Normalized):
    """Factored from 128 rows and columns on, as Adafactor is elsewhere."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if min(param.shape) >= 128:
                    param.data.sub_(param.grad / param.grad.norm(dim=0, keepdim=True), alpha=group["lr"])
                else:
                    param.data.sub_(param.grad, alpha=group["lr"])


class Late(Normalized):
    """Plain in its first step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                scale = param.grad.norm() if state["step"] > 1 else 1.0
                param.data.sub_(param.grad / scale, alpha=group["lr"])


WHOLE = {
    "Normalized": Normalized,
    "ByRows": ByRows,
    "ByColumns": ByColumns,
    "ByShape": ByShape,
    "Trusting": Trusting,
    "OnceLarge": OnceLarge,
    "Late": Late,
    "Adafactor": lambda params, lr: optim.Adafactor(params, lr=lr),
    "Muon": lambda params, lr: optim.Muon(params[:1], lr=lr),
}


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_found(name):
    assert find_problem(WHOLE[name](make_params(), lr=0.1)) == (
        f"optimizer: {name} steps a parameter as a whole (its norm, rows or columns count), so parts of it would be "
        "stepped otherwise; use SGD, Adam, AdamW or another elementwise optimizer, or leave parameters whole "
        "(tensor=1, data='replicate')"
    )


def test_one_group_of_many_is_enough():
    first, second = make_params()

    class Mixed(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    scale = param.grad.norm() if group["normalizes"] else 1.0
                    param.data.sub_(param.grad / scale, alpha=group["lr"])

    groups = [{"params": [first], "normalizes": False}, {"params": [second], "normalizes": True}]
    assert "Mixed steps a parameter as a whole" in (find_problem(Mixed(groups, lr=0.1)) or "")
    groups[1]["normalizes"] = False
    assert find_problem(Mixed(groups, lr=0.1)) is None


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("LBFGS", lambda params: optim.LBFGS(params), "TypeError: LBFGS.step() missing 1 required positional argument"),
        ("SparseAdam", lambda params: optim.SparseAdam(params), "RuntimeError: SparseAdam does not support dense grad"),
    ],
)
def test_what_cannot_be_tried(name, make, reason):
    message = find_problem(make(make_params())) or ""
    assert message.startswith(
        f"optimizer: whether {name} can step divided parameters could not be tried out on a matrix ({reason}"
    )
    assert message.endswith("; use SGD, Adam, AdamW or another optimizer that steps dense float32 matrices")


TIMM = {
    "lamb": "Lamb steps a parameter as a whole",
    "lars": "Lars steps a parameter as a whole",
    "adafactor": "Adafactor steps a parameter as a whole",
    "adafactorbv": "AdafactorBigVision steps a parameter as a whole",
    "adamp": "AdamP steps a parameter as a whole",
    "lookahead_adam": "whether Lookahead can step divided parameters could not be tried out",
    "lion": None,
    "nadamw": None,
}


@pytest.mark.parametrize("name", TIMM)
def test_optimizers_of_timm(name):
    timm_optim = pytest.importorskip("timm.optim")
    model = nn.Linear(4, 4)
    found = find_problem(
        timm_optim.create_optimizer_v2(model, opt=name, lr=0.01, weight_decay=0.05, filter_bias_and_bn=False)
    )
    assert (found is None) if TIMM[name] is None else (TIMM[name] in (found or ""))


class WithSettings(optim.SGD):
    """Keeps settings beside its groups, and something that belongs to the real parameters."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.factor, self.name, self.flag = 2.0, "mine", True
        self.inner = optim.SGD(self.param_groups[0]["params"], lr=lr)

    def step(self, closure=None):
        assert (self.name, self.flag) == ("mine", True)
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=self.factor * group["lr"])
        if hasattr(self, "inner"):
            self.inner.step()


class Prepared(optim.SGD):
    """Makes its state when it is built, as Adagrad does in older torch."""

    def __init__(self, params, lr: float, whole: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.whole = whole
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"sum": torch.full_like(param, 0.5), "step": torch.tensor(0.0), "seen": [1]}

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] += 1
                state["seen"].append(1)
                state["sum"].addcmul_(param.grad, param.grad)
                scale = state["sum"].mean() if self.whole else state["sum"]
                param.data.sub_(param.grad / scale.sqrt(), alpha=group["lr"])


def test_state_that_is_made_with_the_optimizer():
    optimizer = Prepared(make_params(), lr=0.1)
    assert find_problem(optimizer) is None
    for param, state in optimizer.state.items():
        assert state["step"] == 0
        assert state["seen"] == [1]
        assert torch.equal(state["sum"], torch.full_like(param, 0.5))
    assert "steps a parameter as a whole" in (find_problem(Prepared(make_params(), lr=0.1, whole=True)) or "")
    optimizer.state.clear()
    assert "could not be tried out on a matrix (KeyError: 'step')" in (find_problem(optimizer) or "")


def test_settings_beside_the_groups():
    assert find_problem(WithSettings(make_params(), lr=0.1)) is None


def test_the_optimizer_given_is_not_touched():
    params = make_params()
    optimizer = optim.AdamW([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], lr=0.01, weight_decay=0.1)
    ran: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + 1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    ran.clear()
    wrapped = optimizer.step
    before = copy.deepcopy((optimizer.state_dict(), params, scheduler.state_dict()))
    groups, lists = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    states = {p: dict(s) for p, s in optimizer.state.items()}
    counted = getattr(optimizer, "_opt_called", None)
    attributes = set(vars(optimizer))
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with torch.no_grad():
        assert find_problem(optimizer) is None
    assert ran == []
    assert optimizer.param_groups is groups
    assert all(group["params"] is params for group, params in zip(groups, lists, strict=True))
    assert {p: dict(s) for p, s in optimizer.state.items()}.keys() == states.keys()
    assert all(optimizer.state[p][n] is value for p, state in states.items() for n, value in state.items())
    assert optimizer.step is wrapped
    assert getattr(optimizer, "_opt_called", None) == counted
    assert set(vars(optimizer)) == attributes
    torch.testing.assert_close((optimizer.state_dict(), params), before[:2], rtol=0, atol=0)
    assert scheduler.state_dict() == before[2]
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]
    assert all(torch.equal(param.grad, torch.ones_like(param)) for param in params)


def test_a_step_on_the_object_cannot_be_tried():
    """A scheduler's wrapper is none."""
    for make in (OPTIMIZERS["adamw"], MORE[next(iter(MORE))]):
        optimizer = make(make_params())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert find_problem(optimizer) is None
        inner = optimizer.step
        optimizer.step = lambda closure=None, inner=inner: inner(closure)
        assert "was exchanged for one of yours" in find_problem(optimizer)
