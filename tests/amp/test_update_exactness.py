"""An update is exactly what unscale, clip and step by hand would give; a skipped one leaves no trace."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn, optim

from halfmesh.amp import stepper
from halfmesh.amp.recipe import LossScale, Recipe
from tests.support.updates import DYNAMIC, OPTIMIZERS, assert_close, by_hand, give, gradients, make_params, make_update


@pytest.mark.parametrize("master", [False, True], ids=["torch", "naive"])
def test_every_update_is_exactly_one(master):
    """Two peers update the scale before they divide by it: their update is halved whenever the scale grows."""
    param = nn.Parameter(torch.zeros(1))
    scale = LossScale(initial=8.0, growth_interval=2)
    recipe = Recipe(torch.float16, torch.float16 if master else None, not master, master, scale)
    update = make_update([param], lambda p: optim.SGD(p, lr=16.0), recipe)
    held = update.holdings.target(update.holdings.shards[0])
    scales = []
    for step in range(1, 21):
        assert update.scaler is not None
        scales.append(update.scaler.scale.item())
        loss = param.float().sum() * 2.0**-4
        update.backward(loss)
        update.step()
        assert held.item() == -step
        assert param.item() == -step
        update.zero_grad()
    assert scales == [8.0 * 2 ** (step // 2) for step in range(20)]


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0], ids=["no_clip", "clip_bites", "clip_does_not"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_unscale_clip_step_by_hand(name, max_norm):
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], Recipe(loss_scale=DYNAMIC), max_norm=max_norm)
    for step in range(6):
        scale = update.scaler.scale.item()
        give(params, gradients(step), scale)
        expected = torch.cat([g.flatten() for g in gradients(step)]).double().norm().item()
        result = update.step()
        assert result.grad_norm == pytest.approx(expected, rel=1e-6)
        assert result.loss_scale == scale
        assert not result.skipped
    assert_close(params, by_hand(OPTIMIZERS[name], 6, max_norm)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_first_step_leaves_no_trace(name):
    params = make_params()
    before = copy.deepcopy(params)
    update = make_update(params, OPTIMIZERS[name], Recipe(loss_scale=DYNAMIC))
    inf = [torch.full_like(p, math.inf) for p in params]
    give(params, inf)
    result = update.step()
    assert result.skipped
    assert update.scaler.scale.item() == 512.0
    assert_close(params, before, 0, 0)
    for step in range(4):
        update.zero_grad()
        give(params, gradients(step), update.scaler.scale.item())
        assert not update.step().skipped
    assert update.watch.skipped == 1
    assert_close(params, by_hand(OPTIMIZERS[name], 4)[0])


@pytest.mark.parametrize("name", ["sgd_momentum", "adam_amsgrad", "adagrad", "rmsprop"])
def test_overflow_leaves_parameters_state_and_counters(name):
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], Recipe(loss_scale=DYNAMIC), max_norm=1.0)
    give(params, gradients(0), 1024.0)
    update.step()
    before = copy.deepcopy(([p.data for p in params], update.optimizer.state_dict()["state"]))
    grads = gradients(1)
    grads[2][0, 0, 0] = math.nan
    give(params, grads, 1024.0)
    assert update.step().skipped
    after = ([p.data for p in params], update.optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert update.scaler.scale.item() == 512.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_step_as_an_fp32_optimizer_would(name):
    """The gradients are fp16, everything after them is fp32: the same as torch on the rounded gradients."""
    params = make_params()
    recipe = Recipe(torch.float16, torch.float16, False, True, DYNAMIC)
    update = make_update(params, OPTIMIZERS[name], recipe)
    reference = make_params()
    optimizer = OPTIMIZERS[name](reference)
    for step in range(4):
        scale = update.scaler.scale.item()
        give(params, gradients(step), scale)
        give(reference, [p.grad.float() / scale for p in params])
        update.step()
        optimizer.step()
    masters = [update.holdings.masters[p] for p in params]
    assert_close(masters, reference)
    assert all(p.dtype == torch.float16 for p in params)
    assert_close(params, [m.half() for m in masters], 0, 0)


def test_masters_keep_the_full_precision_the_model_came_with():
    param = nn.Parameter(torch.tensor([1.0 + 2.0**-15]))  # 1.0 in fp16
    update = make_update([param], OPTIMIZERS["sgd"], Recipe(torch.float16, torch.float16, False, True))
    assert update.holdings.masters[param].item() == 1.0 + 2.0**-15
    assert param.item() == 1.0


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adagrad", "rmsprop", "adadelta", "asgd"])
def test_streaming_in_parts_is_bitwise_one_step(name, monkeypatch):
    recipe = Recipe(torch.bfloat16, torch.bfloat16, False, True)
    results, calls = [], []
    for limit in (1, 200, 25 * 2**20):
        monkeypatch.setattr(stepper, "STREAM_BYTES", limit)
        params = make_params()
        update = make_update(params, OPTIMIZERS[name], recipe, max_norm=0.7)
        steps = 0
        inner = update.stepper.step_part

        def counted(*args, inner=inner):
            nonlocal steps
            steps += 1
            inner(*args)

        update.stepper.step_part = counted
        for step in range(3):
            give(params, gradients(step))
            update.step()
            assert all(p.grad is None for p in params)
            assert all(m.grad is None for m in update.holdings.masters.values())
        results.append([update.holdings.masters[p].detach() for p in params])
        calls.append(steps)
    assert calls == [9, 6, 3]
    assert_close(results[0], results[2], 0, 0)
    assert_close(results[1], results[2], 0, 0)


def test_no_streaming_where_the_users_hook_would_see_it(monkeypatch):
    monkeypatch.setattr(stepper, "STREAM_BYTES", 1)
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], Recipe(torch.bfloat16, torch.bfloat16, False, True))
    seen = []
    update.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    give(params, gradients(0))
    update.step()
    assert seen == [1]


def test_one_master_gradient_at_a_time(monkeypatch):
    """While one part is stepped, no other part has an fp32 gradient, and its own fp16 gradient is gone."""
    monkeypatch.setattr(stepper, "STREAM_BYTES", 1)
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(torch.float16, torch.float16, False, True))
    alive = []
    update.stepper.step_part = lambda *_: alive.append(
        (sum(m.grad is not None for m in update.holdings.masters.values()), sum(p.grad is not None for p in params))
    )
    give(params, gradients(0))
    update.step()
    assert alive == [(1, 2), (1, 1), (1, 0)]


def test_a_step_that_fails_in_a_part_leaves_nothing_half_done(monkeypatch):
    """The model is what its masters are, and no master keeps a gradient."""
    monkeypatch.setattr(stepper, "STREAM_BYTES", 1)
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(torch.bfloat16, torch.bfloat16, False, True))
    step, calls = update.stepper.step_part, []

    def fail(*args):
        step(*args)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no more")

    update.stepper.step_part = fail
    give(params, gradients(0))
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match="no more"):
        update.step()
    assert [bool((param != old).any()) for param, old in zip(params, before, strict=True)] == [True, True, False]
    for param in params:
        master = update.holdings.masters[param]
        assert master.grad is None
        assert torch.equal(param, master.to(param.dtype))


def test_hooks_run_where_no_parameter_has_a_gradient():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(torch.bfloat16, torch.bfloat16, False, True))
    seen = []
    update.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    update.step()
    assert seen == [1]
