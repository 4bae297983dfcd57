"""The functional forms of fused optimizers: bit for bit what `step()` does, and left alone where that could be told."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

from halfmesh.amp import direct_step
from halfmesh.amp.recipe import FP32, Recipe
from tests.support.updates import DYNAMIC, OPTIMIZERS, give, gradients, make_params, make_update

FUSED = {
    "sgd": {},
    "sgd_momentum": {},
    "sgd_nesterov": {},
    "adam": {},
    "adam_amsgrad": {},
    "adamw": {},
    "adamw_tensor_lr": {},
    "adagrad": {},
    "adamw_maximize": {},
    "adam_decoupled": {},
    "adagrad_decay": {},
}
MAKE = OPTIMIZERS | {
    "adamw_maximize": lambda params: optim.AdamW(params, lr=0.01, maximize=True),
    "adam_decoupled": lambda params: optim.Adam(params, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adagrad_decay": lambda params: optim.Adagrad(params, lr=0.05, lr_decay=0.1, weight_decay=0.01),
}


@pytest.fixture
def forms(monkeypatch):
    """Counts the calls of functional forms."""
    counts = []
    for kind, form in direct_step._FORMS.items():
        counted = functools.partial(lambda form, *args, **kwargs: (counts.append(1), form(*args, **kwargs)), form)
        monkeypatch.setitem(direct_step._FORMS, kind, counted)
    return counts


def run(name, recipe=FP32, steps=6, between=None, skip=(), **rules):
    """Parameters and optimizer state after some updates; `between(update, step)` runs before each."""
    params = make_params()
    update = make_update(params, MAKE[name], recipe, **rules)
    for step in range(steps):
        if between is not None:
            between(update, step)
        scale = update.scaler.scale.item() if update.scaler else 1.0
        give(params, gradients(step), torch.inf if step in skip else scale)
        update.step()
    held = [update.holdings.target(s).detach() for s in update.holdings.shards]
    state = [update.optimizer.state[p] for g in update.optimizer.param_groups for p in g["params"]]
    return held, [v for s in state for v in s.values() if isinstance(v, torch.Tensor)], update


def same(ours, theirs):
    for a, b in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert torch.equal(a, b)


def through_step(update, step):
    """Everything goes through `optimizer.step()`: a hook is registered."""
    if step == 0:
        update.optimizer.register_step_post_hook(lambda *_: None)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    ("recipe", "rules", "skip"),
    [(FP32, {}, ()), (FP32, {"max_norm": 0.7}, ()), (Recipe(loss_scale=DYNAMIC), {"max_norm": 0.7}, (0, 3))],
    ids=["plain", "clipped", "scaled"],
)
def test_bitwise_what_step_does(name, recipe, rules, skip, forms):
    ours = run(name, recipe, skip=skip, **rules)
    assert len(forms) == 5, "all but the first update"
    theirs = run(name, recipe, between=through_step, skip=skip, **rules)
    assert len(forms) == 5
    same(ours, theirs)


@pytest.mark.parametrize("name", ["sgd_momentum", "adam", "adamw", "adagrad"])
def test_bitwise_the_fused_loop_by_hand(name):
    """Clipping does not bite, scale and divisor are powers of two: not a bit differs from torch's own loop."""
    recipe = Recipe(loss_scale=DYNAMIC)
    params, by_hand = make_params(), make_params()
    update = make_update(params, MAKE[name], recipe, max_norm=1e6)
    optimizer = MAKE[name](by_hand)
    for group in optimizer.param_groups:
        group["fused"] = True
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scaler.scale(torch.zeros(()))
    for step in range(6):
        assert update.scaler.scale.item() == scaler.get_scale()
        give(params, gradients(step), scaler.get_scale() * 4)
        give(by_hand, gradients(step), scaler.get_scale() * 4)
        for param in by_hand:
            param.grad.div_(4)
        update.step(4)
        scaler.step(optimizer)
        scaler.update()
    for ours, theirs in zip(params, by_hand, strict=True):
        assert torch.equal(ours, theirs)


def test_a_parameter_without_a_gradient_now_and_then(forms):
    def train(between):
        params = make_params()
        update = make_update(params, OPTIMIZERS["adamw"])
        for step in range(6):
            between(update, step)
            grads = gradients(step)
            give(params, [None if i == step % 4 else g for i, g in enumerate(grads)])
            update.step()
        return params, [v for p in params for v in update.optimizer.state[p].values()]

    ours = train(lambda *_: None)
    assert len(forms) == 4, "its first update goes through step, which makes the state"
    same(ours, train(through_step))


def test_several_groups_with_settings_that_move(forms):
    def train(between):
        params = make_params()
        groups = [{"params": params[:1], "lr": 0.1, "betas": (0.5, 0.9)}, {"params": params[1:2]}]
        update = make_update(params, lambda _: optim.AdamW(groups, lr=0.01))
        scheduler = optim.lr_scheduler.StepLR(update.optimizer, 1, gamma=0.5)
        for step in range(8):
            between(update, step)
            if step == 3:
                update.optimizer.add_param_group({"params": params[2:], "lr": 0.2, "initial_lr": 0.2})
                scheduler.base_lrs.append(0.2)
            if step == 5:
                update.optimizer.param_groups[1]["weight_decay"] = 0.5
            with update.collecting():
                give(params, gradients(step) if step >= 3 else [*gradients(step)[:2], None])
            update.step()
            scheduler.step()
        return params, [v for p in params for v in update.optimizer.state[p].values()]

    ours = train(lambda *_: None)
    assert len(forms) == 2 * 2 + 3 * 4, "not the first update, and not that of the new group"
    same(ours, train(through_step))


def test_groups_in_another_order_than_the_models(forms):
    def train(between):
        params = make_params()
        groups = [{"params": params[2:], "lr": 0.1}, {"params": []}, {"params": [params[1], params[0]]}]
        update = make_update(params, lambda _: optim.AdamW(groups, lr=0.01))
        for step in range(4):
            between(update, step)
            give(params, gradients(step))
            update.step()
        return params, [v for p in params for v in update.optimizer.state[p].values()]

    ours = train(lambda *_: None)
    assert len(forms) == 2 * 3, "all but the first update, a group without parameters takes none"
    same(ours, train(through_step))


def test_momentum_that_is_reset_by_hand(forms):
    def disturb(update, step):
        if step == 3:
            for values in update.optimizer.state.values():
                values["momentum_buffer"] = None

    ours = run("sgd_momentum", between=disturb)
    assert len(forms) == 5  # buffers of zeros are put in their place: the same for torch
    same(ours, run("sgd_momentum", between=lambda *a: (through_step(*a), disturb(*a))))


def test_a_group_that_is_taken_out(forms):
    def train(between):
        params = make_params()
        update = make_update(params, lambda p: optim.AdamW([{"params": p[:1]}, {"params": p[1:]}], lr=0.01))
        for step in range(5):
            between(update, step)
            if step == 2:
                update.optimizer.param_groups.pop()
            give(params, gradients(step))
            update.step()
        return params, []

    same(train(lambda *_: None), train(through_step))


def test_hooks_of_a_copy_run(forms):
    """A copy of an optimizer has no hooks, halfmesh's neither."""
    params = make_params()
    update = copy.deepcopy(make_update(params, OPTIMIZERS["adamw"]))
    ran = []
    update.optimizer.register_step_post_hook(lambda *_: ran.append(1))
    for step in range(3):
        give([s.param for s in update.holdings.shards], gradients(step))
        update.step()
    assert len(ran) == 3


@pytest.mark.parametrize("change", ["clear", "replace", "load", "new_tensor"])
def test_state_that_others_change(change, forms):
    def disturb(update, step):
        if step != 3:
            return
        optimizer = update.optimizer
        if change == "clear":
            optimizer.state.clear()
        elif change == "replace":
            for param in list(optimizer.state):
                optimizer.state[param] = {name: value.clone() * 0.5 for name, value in optimizer.state[param].items()}
        elif change == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            for values in optimizer.state.values():
                values["exp_avg"] = values["exp_avg"] * 0.5

    ours = run("adamw", between=disturb)
    assert len(forms) == (4 if change == "clear" else 5)
    same(ours, run("adamw", between=lambda *a: (through_step(*a), disturb(*a))))


@pytest.mark.parametrize("where", ["pre", "post", "all_pre", "all_post"])
def test_hooks_run(where, forms):
    ran, handles = [], []
    register = {
        "pre": lambda o: o.register_step_pre_hook,
        "post": lambda o: o.register_step_post_hook,
        "all_pre": lambda _: torch_optimizer.register_optimizer_step_pre_hook,
        "all_post": lambda _: torch_optimizer.register_optimizer_step_post_hook,
    }[where]

    def between(update, step):
        if step == 3:
            handles.append(register(update.optimizer)(lambda *_: ran.append(step)))
        if step == 5:
            handles[0].remove()

    run("adamw", between=between)
    assert len(ran) == 2
    assert len(forms) == 3


@pytest.mark.parametrize("recipe", [FP32, Recipe(torch.bfloat16, torch.bfloat16, False, True)], ids=["fp32", "masters"])
def test_hooks_run_without_any_gradient(recipe):
    """A hook may wait for other ranks, which have gradients where this one has none."""
    params, ran = make_params(), []
    update = make_update(params, OPTIMIZERS["adamw"], recipe)
    update.optimizer.register_step_post_hook(lambda *_: ran.append(1))
    give(params, [None] * len(params))
    update.step()
    assert ran == [1]


def test_a_step_of_the_users_own_runs(forms):
    ran = []

    def between(update, step):
        optimizer = update.optimizer
        if step == 2:
            inner = optimizer.step

            @functools.wraps(inner)
            def wrapper(self, closure=None):
                ran.append(1)
                return inner(closure)

            optimizer.step = types.MethodType(wrapper, optimizer)
        if step == 4:
            optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the wrapper

    run("adamw", between=between)
    assert len(ran) == 4
    assert len(forms) == 1


def test_a_step_that_wraps_a_schedulers_runs(forms):
    """`functools.wraps` copies the marks of what it wraps."""
    ran = []

    def between(update, step):
        optimizer = update.optimizer
        if step == 0:
            optim.lr_scheduler.StepLR(optimizer, 1)
        if step == 2:
            inner = optimizer.step

            @functools.wraps(inner)
            def wrapper(closure=None):
                ran.append(1)
                return inner()

            optimizer.step = wrapper

    run("adamw", between=between)
    assert len(ran) == 4
    assert len(forms) == 1


def test_a_class_whose_step_was_exchanged_runs_it(monkeypatch, forms):
    ran, inner = [], optim.AdamW.step
    update = make_update(params := make_params(), OPTIMIZERS["adamw"])

    @functools.wraps(inner)
    def own(self, closure=None):
        ran.append(1)
        return inner(self, closure)

    monkeypatch.setattr(optim.AdamW, "step", own)
    for step in range(3):
        give(params, gradients(step))
        update.step()
    assert len(ran) == 3
    assert forms == []


def test_a_subclass_keeps_its_step(forms):
    class Own(optim.AdamW):
        pass

    params = make_params()
    update = make_update(params, lambda p: Own(p, fused=True))
    for step in range(3):
        give(params, gradients(step))
        update.step()
    assert forms == []


def test_schedulers_do_not_warn(recwarn, forms):
    """torch warns of a scheduler that is stepped before its optimizer, which it learns from `optimizer.step()`."""

    def between(update, step):
        if step == 0:
            update.first = optim.lr_scheduler.StepLR(update.optimizer, 1, gamma=0.9)
        if step == 3:
            update.second = optim.lr_scheduler.StepLR(update.optimizer, 1, gamma=0.9)
        if step in (1, 2, 4, 5):
            update.first.step()
        if step in (4, 5):
            update.second.step()

    run("adamw", between=between)
    assert [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)] == []
    assert len(forms) >= 3


def test_parameters_laid_out_anew():
    """The kernel walks through memory: parameter, gradient and state have to lie alike."""

    def make():
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(2, 3, 4, 4)), nn.Parameter(torch.randn(3))]

    def give_some(params, step):
        torch.manual_seed(step)
        params[0].grad, params[1].grad = torch.randn(2, 3, 4, 4), torch.randn(3)

    ours, theirs = make(), make()
    update, optimizer = make_update(ours, OPTIMIZERS["adamw"]), OPTIMIZERS["adamw"](theirs)
    for step in range(4):
        if step == 2:
            ours[0].data = ours[0].data.to(memory_format=torch.channels_last)
        give_some(ours, step)
        give_some(theirs, step)
        update.step()
        optimizer.step()
    assert not update.holdings.folds
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
