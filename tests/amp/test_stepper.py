"""What is the user's own around an optimizer of torch: its `step`, hooks, schedulers, and its state."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfmesh.amp import stepper
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from tests.support.updates import (
    OPTIMIZERS,
    assert_close,
    by_hand,
    give,
    gradients,
    held,
    make_params,
    make_update,
    take,
)

SCALED = Recipe(loss_scale=LossScale(initial=1024.0, growth_interval=100))
NAIVE = Recipe(torch.bfloat16, torch.bfloat16, False, True)


def plain_sgd(params):
    """SGD with a step of the user's on the object, which knows nothing of scales."""
    optimizer = optim.SGD(params, lr=0.1)

    def step(closure=None):
        with torch.no_grad():
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                param.sub_(param.grad, alpha=0.1)

    optimizer.step = step
    return optimizer


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_step_on_the_object_gets_what_it_would_by_hand(late):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"] if late else plain_sgd, SCALED, max_norm=0.5, on_nonfinite="skip")
    for step in range(4):
        if late and step == 2:
            update.optimizer.step = plain_sgd(params).step
        take(update, params, step)
    assert_close(params, by_hand(OPTIMIZERS["sgd"], 4, 0.5)[0])
    before = [param.detach().clone() for param in params]
    assert take(update, params, 0, math.nan).skipped
    assert_close(params, before, 0, 0)


@pytest.mark.parametrize("everywhere", [False, True], ids=["its own", "of all optimizers"])
@pytest.mark.parametrize("recipe", [FP32, SCALED], ids=["fp32", "scaled"])
def test_hooks_before_the_step_see_gradients_as_they_are_used(recipe, everywhere):
    """And what they do with them counts, as in a loop by hand. They do not run in a skipped update."""
    norms = []

    def clamp(optimizer, *_):
        held = [param for group in optimizer.param_groups for param in group["params"]]
        norms.append(float(nn.utils.get_total_norm([param.grad for param in held])))
        nn.utils.clip_grad_value_(held, 0.02)

    def train(params, optimizer, step, scale):
        register = register_optimizer_step_pre_hook if everywhere else optimizer.register_step_pre_hook
        handle = register(clamp)
        try:
            for number in range(3):
                give(params, gradients(number), scale)
                step()
        finally:
            handle.remove()
        seen = norms.copy()
        norms.clear()
        return seen

    params, expected = make_params(), make_params()
    update = make_update(params, OPTIMIZERS["adamw"], recipe, max_norm=0.5)
    ours = train(params, update.optimizer, update.step, 1024.0 if recipe is SCALED else 1.0)
    optimizer = OPTIMIZERS["adamw"](expected)

    def by_hand():
        nn.utils.clip_grad_norm_(expected, 0.5)
        optimizer.step()

    assert ours == pytest.approx(train(expected, optimizer, by_hand, 1.0), rel=1e-5)
    assert_close(params, expected)
    if recipe is SCALED:
        update.optimizer.register_step_pre_hook(clamp)
        assert take(update, params, 0, math.inf).skipped
        assert norms == []


@pytest.mark.parametrize("change", ["exchange", "load", "settings"])
def test_state_that_others_change_is_what_the_next_update_uses(change):
    def train(fused):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))]
        update = make_update(params, OPTIMIZERS["adamw"], fused=fused)
        optimizer = update.optimizer
        for step in range(4):
            if step == 2 and change == "exchange":  # between two parameters, the state dicts in their old order
                first, second = optimizer.state.pop(params[0]), optimizer.state.pop(params[1])
                optimizer.state[params[1]], optimizer.state[params[0]] = first, second
            elif step == 2 and change == "load":
                optimizer.load_state_dict(optimizer.state_dict())
            elif step == 2:
                optimizer.param_groups[0].update(lr=0.2, weight_decay=0.5)
            for number, param in enumerate(params):
                param.grad = torch.full((3,), 1.0 + number - 3 * step * number)
            update.step()
        return params

    assert_close(train("auto"), train(False))


def capturable_in_part(params):
    return optim.AdamW([{"params": params[:1], "capturable": True}, {"params": params[1:]}], fused=True)


@pytest.fixture
def gpu(monkeypatch):
    """torch's optimizers are told that the current stream of a GPU is captured, or not."""
    stream = mock.Mock()
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.current_stream", lambda: stream)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # torch 2.11 asks these two
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", stream.is_capturing)
    monkeypatch.setattr(stepper, "is_captured", lambda _: stream.is_capturing())
    return stream


@pytest.mark.parametrize("recipe", [SCALED, NAIVE], ids=["scaled", "naive"])
@pytest.mark.parametrize("name", ["adamw", "adagrad", "adamw_of_two_groups"])
def test_a_fused_step_can_be_captured(name, recipe, gpu, recwarn):
    """torch refuses Adam without `capturable`, and warns of it in an ordinary step."""
    params, make = make_params(), OPTIMIZERS.get(name, capturable_in_part)
    update = make_update(params, make, recipe)
    settings = [group.get("capturable") for group in update.optimizer.param_groups]
    for step, capturing in enumerate([False, True, False]):
        gpu.is_capturing.return_value = capturing
        take(update, params, step)
        assert [group.get("capturable") for group in update.optimizer.param_groups] == settings
    gpu.is_capturing.return_value = False
    tolerances = (0.05, 0.05) if recipe is NAIVE else ()
    assert_close(held(update), by_hand(make, 3)[0], *tolerances)
    assert not recwarn.list
