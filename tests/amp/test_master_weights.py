"""What the user's optimizer holds: groups, masters, state, and what others do to them."""

import pytest
import torch
from torch import nn, optim

from halfmesh.amp.convert import convert
from halfmesh.amp.precision import Precision
from halfmesh.amp.recipe import Recipe
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


# -- the bits of split masters: weights and remainders make them again ------------------------------------------------


def every_kind() -> torch.Tensor:
    """fp32 of all upper halves, each with the lower ones at the edges, and some of a million others."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    high = torch.arange(2**16)
    bits = ((high[:, None] << 16) + low).flatten()
    others = torch.randint(2**32, (2**20,), generator=torch.Generator().manual_seed(0))
    return torch.cat([bits, others]).to(torch.int32).view(torch.float32)


def test_every_number_comes_back_bit_for_bit():
    masters = every_kind()
    weights = masters.clone()
    remainders = split_(weights)
    held = weights.bfloat16()
    assert remainders.dtype == torch.int16
    again = held.float()
    join_(again, remainders)
    numbers = ~masters.isnan() & ((masters == 0) | (masters.abs() >= 2**-134))
    assert torch.equal(again.view(torch.int32)[numbers], masters.view(torch.int32)[numbers])
    nans = masters.isnan()
    assert again[nans].isnan().all()
    assert held[nans].isnan().all()
    small = ~numbers & ~nans
    assert small.any()
    assert torch.equal(again[small], torch.zeros(()).copysign(masters[small]))
    # The weights are the nearest ones, as torch rounds; but ties go away from 0.
    bits = masters.view(torch.int32).long() & 0xFFFFFFFF
    tie = (bits & 0xFFFF) == 0x8000
    assert torch.equal(held[~tie & ~nans], masters.bfloat16()[~tie & ~nans])
    found = held[tie & ~nans].view(torch.int16).long() & 0xFFFF
    assert torch.equal(found, (bits[tie & ~nans] >> 16) + 1)


def test_a_zero_that_was_written_is_no_nan():
    """As a mask writes it into a weight: with a negative remainder its bits would be a nan."""
    weights = torch.tensor([0.0, -0.0, 0.0, 1.0])
    join_(weights, torch.tensor([-5, -5, 5, -5], dtype=torch.int16))
    assert weights[:3].tolist() == [0.0, 0.0, 0.0]
    assert 1 - 2**-20 < float(weights[3]) < 1
