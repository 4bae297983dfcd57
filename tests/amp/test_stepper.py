"""What is the user's own around an optimizer of torch: its `step`, hooks, schedulers, groups and state; and masters."""

import math

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfmesh.amp.convert import convert
from halfmesh.amp.precision import Precision
from halfmesh.amp.recipe import FP32, Recipe
from halfmesh.amp.split_masters import join_, split_
from halfmesh.utils.param_shard import ParamShard
from tests.support.updates import (
    DYNAMIC,
    OPTIMIZERS,
    assert_close,
    by_hand,
    give,
    gradients,
    held,
    make_params,
    make_update,
    scale_of,
    take,
)

SCALED, MASTERED = Recipe(loss_scale=DYNAMIC), Recipe(torch.float16, torch.float16, False, True, DYNAMIC)


@pytest.mark.parametrize("everywhere", [False, True], ids=["its own", "of all optimizers"])
@pytest.mark.parametrize("recipe", [FP32, SCALED], ids=["fp32", "scaled"])
def test_hooks_before_the_step_see_gradients_as_they_are_used(recipe, everywhere):
    """Unscaled and clipped. They do not run in a skipped update."""
    norms, params = [], make_params()
    update = make_update(params, OPTIMIZERS["adamw"], recipe, max_norm=0.5)
    register = register_optimizer_step_pre_hook if everywhere else update.optimizer.register_step_pre_hook
    handle = register(lambda *_: norms.append(nn.utils.get_total_norm([param.grad for param in params]).item()))
    try:
        take(update, params, 0)
        assert recipe is FP32 or take(update, params, 0, math.inf).skipped
    finally:
        handle.remove()
    assert norms == pytest.approx([0.5], rel=1e-5)
    assert_close(params, by_hand(OPTIMIZERS["adamw"], 1, 0.5)[0])


@pytest.mark.parametrize("change", ["load", "settings"])
def test_state_that_others_change_is_what_the_next_update_uses(change):
    def train(fused):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))]
        update = make_update(params, OPTIMIZERS["adamw"], fused=fused)
        optimizer = update.optimizer
        for step in range(4):
            if step == 2 and change == "load":
                optimizer.load_state_dict(optimizer.state_dict())
            elif step == 2:
                optimizer.param_groups[0].update(lr=0.2, weight_decay=0.5)
            for number, param in enumerate(params):
                param.grad = torch.full((3,), 1.0 + number - 3 * step * number)
            update.step()
        return params

    assert_close(train("auto"), train(False))


@pytest.mark.parametrize("choice", ["auto", False])
def test_fused_leaves_the_users_choice(choice):
    fused, plain = ((True, False) if choice == "auto" else (None, None)), (None, None)
    expected = {"adamw": fused, "sgd_momentum": fused, "sgd_dampening": plain, "rmsprop": plain}
    for name, flags in (expected | {"adam_foreach": (None, True)}).items():
        group = make_update(make_params(), OPTIMIZERS[name], fused=choice).optimizer.param_groups[0]
        assert (group.get("fused"), group.get("foreach")) == flags, name


def test_a_subclass_with_its_own_step_is_not_trusted_with_the_scale():
    class MyAdam(optim.Adam):
        def step(self, closure=None):
            assert not hasattr(self, "grad_scale")
            super().step()

    params = make_params()
    update = make_update(params, lambda p: MyAdam(p, lr=0.01, fused=True), SCALED)
    for step in range(3):
        take(update, params, step)
    assert_close(params, by_hand(OPTIMIZERS["adam"], 3)[0])


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw"])
def test_parameters_with_gaps_or_a_changed_layout(name):
    """The CPU's fused kernels ignore strides: they must not be chosen where those of parameters or state differ."""

    def run(with_update):
        torch.manual_seed(0)
        gaps, image, conv = (
            nn.Parameter(torch.randn(4, 8)[:, :5]),
            nn.Parameter(torch.randn(4, 3, 3, 3)),
            nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),
        )
        params = [gaps, image, conv.weight]
        make = OPTIMIZERS[name]
        update = make_update(params, make, SCALED) if with_update else None
        optimizer = update.optimizer if with_update else make(params)
        for step in range(5):
            if step == 2:
                image.data = image.data.to(memory_format=torch.channels_last)
            if step == 3:  # as from a file without strides
                state = optimizer.state[conv.weight]
                state.update({key: value.clone().contiguous() for key, value in state.items()})
            generator = torch.Generator().manual_seed(step)
            scale = scale_of(update) if with_update else 1.0
            give(params, [torch.randn(p.shape, generator=generator) for p in params], scale)
            update.step() if with_update else optimizer.step()
        return params

    assert_close(run(True), run(False))


@pytest.mark.parametrize("master", [False, True])
def test_several_groups_and_one_added_later(master):
    """In an order of their own, with a scheduler: as in a loop by hand on the same gradients."""
    params, reference = make_params(), make_params()
    groups = lambda p: optim.AdamW([{"params": p[1:2], "lr": 0.1}, {"params": p[:1], "lr": 0.01}])  # noqa: E731
    update, optimizer = make_update(params, groups, MASTERED if master else SCALED), groups(reference)
    schedulers = [optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (update.optimizer, optimizer)]
    for step in range(4):
        if step == 2:
            for scheduler, its in zip(schedulers, (params, reference), strict=True):
                scheduler.optimizer.add_param_group({"params": its[2:], "lr": 0.2, "initial_lr": 0.2})
                scheduler.base_lrs.append(0.2)
        update.zero_grad()
        optimizer.zero_grad()
        scale = scale_of(update)
        update.follow_groups()
        update.before_backward()
        give(params, gradients(step), scale)
        update.after_backward()
        give(reference, [(g * scale).to(params[0].dtype).float() / scale for g in gradients(step)])
        update.step()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    first, second, third = held(update)
    assert_close([second, first], reference[:2])
    assert_close([third], reference[2:])  # from what it came with, not from what the model held


@pytest.mark.promise("schedulers need the inner optimizer, created after sharding")
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw"])
def test_existing_state_is_taken_along(name, master):
    params, optimizer = by_hand(OPTIMIZERS[name], 3)
    model = nn.ParameterList(params)
    recipe = Recipe(torch.bfloat16, torch.bfloat16 if master else None, not master, master)
    shards = [ParamShard(n, p) for n, p in model.named_parameters()]
    update = convert(model, optimizer, shards, Precision(recipe, torch.device("cpu")))
    for step in (3, 4):
        take(update, params, step)
    tolerance = 2e-3 if master else 2e-6  # the gradients are rounded to bf16
    assert_close(held(update), by_hand(OPTIMIZERS[name], 5)[0], tolerance, tolerance)


def test_every_number_comes_back_bit_for_bit():
    """fp32 of all upper halves, each with the lower ones at the edges, and some of a million others."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = ((torch.arange(2**16)[:, None] << 16) + low).flatten()
    others = torch.randint(2**32, (2**20,), generator=torch.Generator().manual_seed(0))
    masters = torch.cat([bits, others]).to(torch.int32).view(torch.float32)
    weights = masters.clone()
    remainders = split_(weights)
    held = weights.bfloat16()
    assert remainders.dtype == torch.int16
    again = held.float()
    join_(again, remainders)
    nans, numbers = masters.isnan(), (masters == 0) | (masters.abs() >= 2**-134)
    assert torch.equal(again.view(torch.int32)[numbers], masters.view(torch.int32)[numbers])
    assert (again[nans].isnan() & held[nans].isnan()).all()
    small = ~numbers & ~nans
    assert small.any()
    assert torch.equal(again[small], torch.zeros(()).copysign(masters[small]))
    # The weights are the nearest ones, as torch rounds; but ties go away from 0.
    tie = (masters.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(held[~tie & ~nans], masters.bfloat16()[~tie & ~nans])
    away = (masters[tie & ~nans].view(torch.int32) >> 16) + 1
    assert torch.equal(held[tie & ~nans].view(torch.int16), away.to(torch.int16))


def test_a_zero_that_was_written_is_no_nan():
    """As a mask writes it into a weight: with a negative remainder its bits would be a nan."""
    weights = torch.tensor([0.0, -0.0, 0.0, 1.0])
    join_(weights, torch.tensor([-5, -5, 5, -5], dtype=torch.int16))
    assert weights[:3].tolist() == [0.0, 0.0, 0.0]
    assert 1 - 2**-20 < float(weights[3]) < 1
