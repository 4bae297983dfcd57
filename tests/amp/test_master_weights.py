"""What the user's optimizer holds: groups, masters, state, and what others do to them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn, optim

from halfmesh.amp.convert import convert
from halfmesh.amp.precision import Precision
from halfmesh.amp.recipe import Recipe
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

BF16 = Recipe(torch.bfloat16, torch.bfloat16, False, True)
FP16 = Recipe(torch.float16, torch.float16, False, True, DYNAMIC)


@pytest.mark.parametrize("master", [False, True])
def test_several_groups_and_one_added_later(master):
    """In an order of their own, with a scheduler: as in a loop by hand on the same gradients."""
    params, reference = make_params(), make_params()
    groups = lambda p: optim.AdamW([{"params": p[1:2], "lr": 0.1}, {"params": p[:1], "lr": 0.01}])  # noqa: E731
    update, optimizer = make_update(params, groups, FP16 if master else Recipe(loss_scale=DYNAMIC)), groups(reference)
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
    update = convert(
        model,
        optimizer,
        [ParamShard(n, p) for n, p in model.named_parameters()],
        Precision(recipe, torch.device("cpu")),
    )
    for step in (3, 4):
        take(update, params, step)
    tolerance = 2e-3 if master else 2e-6  # the gradients are rounded to bf16
    assert_close(held(update), by_hand(OPTIMIZERS[name], 5)[0], tolerance, tolerance)


@pytest.mark.parametrize(("recipe", "name"), [(Recipe(), "rmsprop"), (BF16, "adamw")], ids=["fp32", "masters"])
def test_what_the_optimizer_holds_no_more_is_not_judged(recipe, name):
    """Its gradient may be anything, and its weight stays, in full precision."""
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], recipe, max_norm=0.5, on_nonfinite="skip")
    take(update, params, 0)
    update.zero_grad()
    (group,) = update.optimizer.param_groups
    dropped = group["params"].pop(0)
    before, others = dropped.detach().clone(), [p.detach().clone() for p in params[1:]]
    grads = gradients(1)
    give(params, [torch.full_like(grads[0], math.inf), *grads[1:]])
    result = update.step()
    expected = torch.linalg.vector_norm(torch.stack([g.to(params[0].dtype).double().norm() for g in grads[1:]]))
    assert not result.skipped
    assert result.grad_norm == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(dropped, before)
    assert torch.equal(params[0], before.to(params[0].dtype))
    assert all(not torch.equal(a, b) for a, b in zip(params[1:], others, strict=True))
    group["params"].append(dropped)  # and again
    give(params, grads)
    assert update.step().grad_norm > expected
