"""What is the user's own around an optimizer of torch: its `step`, hooks before it, and its state."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import halfmesh
from halfmesh.amp import stepper
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from tests.support.updates import OPTIMIZERS, assert_close, by_hand, give, gradients, make_params, make_update

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
@pytest.mark.parametrize("recipe", [FP32, SCALED], ids=["fp32", "scaled"])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_step_on_the_object_gets_what_it_would_by_hand(recipe, max_norm, late):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"] if late else plain_sgd, recipe, max_norm=max_norm)
    for step in range(4):
        give(params, gradients(step), 1024.0 if recipe is SCALED else 1.0)
        if late and step == 2:
            update.optimizer.step = plain_sgd(params).step
        update.step()
    assert_close(params, by_hand(OPTIMIZERS["sgd"], 4, max_norm)[0])


def test_a_step_on_the_object_is_not_called_in_a_skipped_update():
    params = make_params()
    update = make_update(params, plain_sgd, on_nonfinite="skip")
    give(params, gradients(0), math.nan)
    assert update.step().skipped
    assert_close(params, make_params(), 0, 0)


def test_a_step_on_the_object_is_called_once_with_all(monkeypatch):
    monkeypatch.setattr(stepper, "STREAM_BYTES", 1)
    calls, params = [], make_params()
    update = make_update(params, plain_sgd, NAIVE)
    inner = update.optimizer.step
    update.optimizer.step = lambda: (
        calls.append([m.grad is not None for m in update.holdings.masters.values()]),
        inner(),
    )
    give(params, gradients(0))
    update.step()
    assert calls == [[True] * 3]


@pytest.mark.parametrize("everywhere", [False, True], ids=["its own", "of all optimizers"])
@pytest.mark.parametrize("recipe", [FP32, SCALED], ids=["fp32", "scaled"])
def test_hooks_before_the_step_see_gradients_as_they_are_used(recipe, everywhere):
    """And what they do with them counts, as in a loop by hand."""
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


def test_hooks_before_the_step_do_not_run_in_a_skipped_update():
    params, ran = make_params(), []
    update = make_update(params, OPTIMIZERS["adamw"], SCALED)
    update.optimizer.register_step_pre_hook(lambda *_: ran.append(1))
    give(params, gradients(0), math.inf)
    assert update.step().skipped
    assert ran == []


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adam_amsgrad", "adagrad"])
@pytest.mark.parametrize("recipe", [FP32, NAIVE], ids=["fp32", "naive"])
def test_state_of_another_layout(name, recipe):
    """Fused kernels of the CPU walk through memory without looking at strides."""

    def train(fused):
        torch.manual_seed(0)
        conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        update = make_update(list(conv.parameters()), OPTIMIZERS[name], recipe, fused=fused)
        for step in range(5):
            if step == 3:  # as from a file without strides
                for state in update.optimizer.state.values():
                    state.update({key: value.clone().contiguous() for key, value in state.items()})
            for number, param in enumerate(conv.parameters()):
                torch.manual_seed(10 * step + number)
                param.grad = torch.randn(param.shape).to(param)
            update.step()
        return [update.holdings.target(shard) for shard in update.holdings.trained]

    assert_close(train("auto"), train(False))


def test_state_that_changes_places():
    """Two parameters' states are exchanged, the state dicts in their old order."""

    def run(fused):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        update = make_update(params, OPTIMIZERS["adamw"], fused=fused)
        for step in range(4):
            if step == 2:
                state = update.optimizer.state
                first, second = state.pop(params[0]), state.pop(params[1])
                state[params[1]], state[params[0]] = first, second
            for number, param in enumerate(params):
                param.grad = torch.full((3,), 1.0 + number - 3 * step * number)
            update.step()
        return params

    assert_close(run("auto"), run(False))


@pytest.mark.parametrize(
    ("config", "batches", "warns"),
    [
        ({"gradient_accumulation": 2}, 3, True),
        ({"gradient_accumulation": 2}, 4, False),
        ({}, 3, False),
        ({"loss_reduction": "weighted"}, 2, True),
    ],
    ids=["short cycle", "whole cycles", "no cycles", "weighted"],
)
def test_edits_of_gradients_that_are_still_to_be_divided_are_told(config, batches, warns, caplog):
    model = nn.Linear(4, 1)
    weighted = "loss_reduction" in config
    data = [torch.ones(2, 4)] * batches
    engine = halfmesh.initialize(
        model,
        optim.SGD(model.parameters(), lr=0.1),
        lambda output: (output.sum(), 2) if weighted else output.mean(),
        torch.utils.data.DataLoader(data, batch_size=None),
        config,
        device="cpu",
    )
    with caplog.at_level(logging.WARNING):
        for x in engine.dataloader:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x)))
            model.weight.grad.clamp_(max=0.01)
            engine.step()
    engine.close()
    assert ("gradients were changed" in caplog.text) == warns
    assert ("still have to be divided" in caplog.text) == warns


def test_momentum_that_was_never_used_is_taken_back():
    """Fused SGD starts from zeros, which with dampening is another first step than without a buffer."""
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd_momentum"])
    update.optimizer.param_groups[0]["dampening"] = 0.5
    for step in range(2):
        give(params, gradients(step))
        update.step()
    expected = by_hand(lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.5), 2)[0]
    assert_close(params, expected)


def test_momentum_that_was_used_stays():
    def train(update):
        for step in range(3):
            give(params, gradients(step) if step else [None, *gradients(0)[1:]])  # the first one begins later
            if step == 2:
                update.optimizer.param_groups[0]["dampening"] = 0.5
            update.step()
        return params

    params = make_params()
    ours = train(make_update(params, OPTIMIZERS["sgd_momentum"]))
    params = make_params()
    assert_close(ours, train(make_update(params, OPTIMIZERS["sgd_momentum"], fused=False)))
