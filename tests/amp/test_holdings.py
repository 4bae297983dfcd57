"""What the user's optimizer holds: groups, masters, state, and what others do to them."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn, optim

from halfmesh.amp.convert import convert
from halfmesh.amp.recipe import LossScale, Recipe
from halfmesh.errors import InputError
from halfmesh.shard import ParamShard
from tests.support.updates import DYNAMIC, OPTIMIZERS, assert_close, by_hand, give, gradients, make_params, make_update


@pytest.mark.parametrize("master", [False, True])
def test_several_groups_and_one_added_later(master):
    params = make_params()
    half = torch.float16 if master else None
    recipe = Recipe(torch.float16, half, False, True, DYNAMIC) if master else Recipe(loss_scale=DYNAMIC)
    groups = lambda p: optim.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:2], "lr": 0.01}])  # noqa: E731
    update = make_update(params, groups, recipe)
    reference = make_params()
    optimizer = groups(reference)
    scheduler = optim.lr_scheduler.StepLR(update.optimizer, 1, gamma=0.5)
    other_scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(4):
        if step == 2:
            update.optimizer.add_param_group({"params": params[2:], "lr": 0.2, "initial_lr": 0.2})
            optimizer.add_param_group({"params": reference[2:], "lr": 0.2, "initial_lr": 0.2})
            scheduler.base_lrs.append(0.2)
            other_scheduler.base_lrs.append(0.2)
        update.zero_grad()
        optimizer.zero_grad()
        scale = update.scaler.scale.item()
        with update.collecting():
            give(params, gradients(step), scale)
        give(reference, [(g * scale).to(half or torch.float32).float() / scale for g in gradients(step)])
        update.step()
        optimizer.step()
        scheduler.step()
        other_scheduler.step()
    held = [update.holdings.target(s) for s in update.holdings.shards]
    assert_close(held[:2], reference[:2])
    start = make_params()[2].half().float() if master else make_params()[2]  # added from what the model held
    moved, expected = (held[2] - start).detach(), (reference[2] - make_params()[2]).detach()
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=0)
    assert [len(g["params"]) for g in update.optimizer.param_groups] == [1, 1, 1]


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adagrad", "rmsprop"])
def test_existing_state_is_taken_along(name, master):
    params, optimizer = by_hand(OPTIMIZERS[name], 3)
    model = nn.ParameterList(params)
    recipe = Recipe(torch.bfloat16, torch.bfloat16 if master else None, not master, master)
    update = convert(model, optimizer, [ParamShard(n, p) for n, p in model.named_parameters()], recipe)
    expected = by_hand(OPTIMIZERS[name], 5)[0]
    for step in (3, 4):
        give(params, gradients(step))
        update.step()
    held = [update.holdings.target(s) for s in update.holdings.shards]
    tolerance = 2e-3 if master else 2e-6  # the gradients are rounded to bf16
    assert_close(held, expected, tolerance, tolerance)


def test_state_dict_resumes_bitwise():
    def make():
        params = make_params()
        recipe = Recipe(torch.float16, torch.float16, False, True, LossScale(1024.0, growth_interval=3, hysteresis=2))
        return params, make_update(params, OPTIMIZERS["adamw"], recipe, max_norm=0.5)

    def run(params, update, steps):
        for step in steps:
            grads = gradients(step)
            give(params, [g * (math.inf if step in (1, 4) else 1) for g in grads], update.scaler.scale.item())
            update.step()

    params, update = make()
    run(params, update, range(4))
    state = copy.deepcopy(update.state_dict())
    run(params, update, range(4, 9))
    other_params, other = make()
    other.load_state_dict(state)
    run(other_params, other, range(4, 9))
    torch.testing.assert_close(other.state_dict(), update.state_dict(), rtol=0, atol=0)
    assert_close(other_params, params, 0, 0)


def test_loading_the_optimizer_alone_keeps_the_update_true():
    """`optimizer.load_state_dict` brings its own flags; what the update relies on is found again."""
    params, plain = by_hand(OPTIMIZERS["adamw"], 2)
    state = plain.state_dict()
    fresh = copy.deepcopy(params)
    update = make_update(fresh, OPTIMIZERS["adamw"], Recipe(loss_scale=DYNAMIC))
    update.optimizer.load_state_dict(state)
    assert update.holdings.folds
    give(fresh, gradients(2), 1024.0)
    update.step()
    assert_close(fresh, by_hand(OPTIMIZERS["adamw"], 3)[0])


def test_the_users_own_step_is_refused_until_close():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"])
    give(params, gradients(0))
    with pytest.raises(InputError, match=r"optimizer.step\(\) was called outside the engine.*engine.step\(\)"):
        update.optimizer.step()
    update.close()
    update.optimizer.step()
    assert_close(params, by_hand(OPTIMIZERS["sgd"], 1)[0])


def test_foreign_parameters_are_named():
    stranger = nn.Parameter(torch.zeros(3, 4))
    message = r"holds 1 parameter\(s\) that are not the model's: param_groups\[0\].*\(3, 4\)"
    with pytest.raises(InputError, match=message):
        make_update(make_params(), lambda p: optim.SGD([*p, stranger], lr=0.1))


BF16 = Recipe(compute_dtype=torch.bfloat16, param_dtype=torch.bfloat16, master_weights=True)


@pytest.mark.parametrize("recipe", [Recipe(), BF16], ids=["fp32", "masters"])
@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_what_the_optimizer_holds_no_more_is_not_judged(recipe, name):
    """As without masters: its gradient may be anything, is cleared, and its weight stays, in full precision."""
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], recipe, max_norm=0.5, on_nonfinite="skip")
    give(params, gradients(0))
    update.step()
    update.zero_grad()
    (group,) = update.optimizer.param_groups
    del group["params"][0]
    before, others = params[0].detach().clone(), [p.detach().clone() for p in params[1:]]
    master = update.holdings.masters.get(params[0])
    value = None if master is None else master.detach().clone()
    grads = gradients(1)
    give(params, [torch.full_like(grads[0], math.inf), *grads[1:]])
    result = update.step()
    expected = torch.linalg.vector_norm(torch.stack([g.to(params[0].dtype).double().norm() for g in grads[1:]]))
    assert not result.skipped
    assert result.grad_norm == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(params[0], before)
    assert all(not torch.equal(a, b) for a, b in zip(params[1:], others, strict=True))
    if value is not None:
        assert torch.equal(master, value)
        assert any(torch.equal(kept, value) for kept in update.holdings.masters_by_name().values())
    group["params"].append(params[0] if master is None else master)  # and again
    give(params, grads)
    assert update.step().grad_norm > expected


def test_parameters_without_gradient_are_left_alone():
    params = make_params()
    before = params[1].detach().clone()
    update = make_update(params, OPTIMIZERS["sgd_momentum"], Recipe(loss_scale=DYNAMIC))
    for step in range(3):
        grads = gradients(step)
        give(params, [grads[0], None, grads[2]], 1024.0)
        update.step()
    torch.testing.assert_close(params[1].detach(), before, rtol=0, atol=0)


def test_loading_into_other_scaler_settings():
    saved = make_update(make_params(), OPTIMIZERS["sgd"], Recipe(loss_scale=LossScale(initial=2.0**20))).state_dict()
    static = make_update(make_params(), OPTIMIZERS["sgd"], Recipe(loss_scale=LossScale(128.0, dynamic=False)))
    static.load_state_dict(saved)
    assert static.scaler.scale.item() == 128.0
    capped = make_update(make_params(), OPTIMIZERS["sgd"], Recipe(loss_scale=LossScale(64.0, max_scale=1024.0)))
    capped.load_state_dict(saved)
    assert (capped.scaler.scale.item(), capped.scaler.max_scale) == (1024.0, 1024.0)


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw"])
def test_close_gives_model_and_optimizer_back(name):
    """After close a plain torch loop goes on from the masters' values and the optimizer's state."""
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], Recipe(torch.float16, torch.float16, False, True))
    give(params, gradients(0))
    update.step()
    masters = [update.holdings.masters[p].detach().clone() for p in params]
    update.close()
    assert all(p.dtype == torch.float32 for p in params)
    assert_close(params, masters, 0, 0)
    give(params, gradients(1))
    update.optimizer.step()
    assert not torch.equal(params[0], masters[0])
    assert {id(p) for p in update.optimizer.param_groups[0]["params"]} == {id(p) for p in params}
    assert set(update.optimizer.state) == set(params)


def test_group_order_and_scheduler_survive_masters():
    params = make_params()
    optimizer = optim.SGD(OrderedDict(params=params)["params"], lr=0.1)
    groups = optimizer.param_groups
    update = make_update(params, lambda _: optimizer, Recipe(torch.bfloat16, torch.bfloat16, False, True))
    assert update.optimizer.param_groups is groups
    assert [p.shape for p in groups[0]["params"]] == [p.shape for p in params]
    assert all(p.dtype == torch.float32 for p in groups[0]["params"])


def test_integer_parameters_get_no_master():
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.ones(2)))
    model.register_parameter("codes", nn.Parameter(torch.tensor([1, 2]), requires_grad=False))
    shards = [ParamShard(name, p) for name, p in model.named_parameters()]
    update = convert(
        model,
        OPTIMIZERS["rmsprop"](list(model.parameters())),
        shards,
        Recipe(torch.bfloat16, torch.bfloat16, False, True),
    )
    assert list(update.state_dict()["masters"]) == ["w"]
    update.backward(model.w.sum())
    update.step()
    assert model.codes.tolist() == [1, 2]
