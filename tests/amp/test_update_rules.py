"""Clipping, skipping, raising, watching, logging: what an update does besides stepping."""

import copy
import math

import pytest
import torch

from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.errors import InputError, NonFiniteError
from tests.support.updates import (
    DYNAMIC,
    OPTIMIZERS,
    assert_close,
    by_hand,
    give,
    gradients,
    make_params,
    make_update,
    take,
)

SCALED = Recipe(loss_scale=DYNAMIC)
STATIC = Recipe(loss_scale=LossScale(initial=8.0, dynamic=False))
APEX = Recipe(loss_scale=LossScale(initial=8.0, dynamic=False, skips=False))


@pytest.mark.parametrize(
    ("recipe", "ending"),
    [
        (Recipe(loss_scale=LossScale(initial=8.0, min_scale=4.0)), "loss scale is 4"),
        (Recipe(loss_scale=LossScale(initial=8.0)), "loss scale is 2"),
        (STATIC, "loss scale is 8"),
        (FP32, "there is no loss scaling"),
    ],
)
def test_a_storm_of_skips_stops_with_a_diagnosis(recipe, ending):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], recipe, max_consecutive_skips=3, max_norm=1.0)

    def step_with_nan():
        give(params, gradients(0))
        params[2].grad.fill_(math.nan)
        update.step()

    take(update, params, 0)
    step_with_nan()
    step_with_nan()
    with pytest.raises(NonFiniteError, match=r"3 updates in a row .*\(max_consecutive_skips=3\)") as caught:
        step_with_nan()
    assert "the first parameter with a non-finite gradient is 'p2'" in str(caught.value)
    assert ending in str(caught.value)


@pytest.mark.parametrize(("recipe", "skips"), [(FP32, False), (APEX, False), (STATIC, True), (SCALED, True)])
def test_a_loss_scale_skips_but_not_a_static_one_of_apex(recipe, skips):
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], recipe, max_norm=1.0)
    before = copy.deepcopy(params)
    assert take(update, params, 0, math.inf).skipped == skips
    assert all(torch.equal(param, old) == skips for param, old in zip(params, before, strict=True))


@pytest.mark.parametrize("recipe", [FP32, SCALED])
def test_on_a_gpu_a_storm_stops_one_update_later(recipe):
    """The count is on its way to the host meanwhile, and good updates in between begin a new one."""
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], recipe, max_consecutive_skips=3)
    update.skip_counter._late = True
    bad = [False, True, True, False, True, True, True]
    if recipe is FP32:  # nothing else measures: the third update is looked at, and from the sixth on each
        bad = [False] * 5 + [True] * 3
    for step, is_bad in enumerate(bad):
        take(update, params, step, math.inf if is_bad else 1.0)
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        take(update, params, 0)


def test_clip_for_one_update():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], SCALED, max_norm=100.0)
    give(params, gradients(0), 1024.0)
    norm = update.clip_grad_norm_(0.25)
    assert norm.item() == pytest.approx(torch.cat([g.flatten() for g in gradients(0)]).norm().item(), rel=1e-6)
    update.step()
    assert_close(params, by_hand(OPTIMIZERS["sgd"], 1, 0.25)[0])
    before = copy.deepcopy(params)
    take(update, params, 1)
    assert_close(params, [b - 0.1 * g for b, g in zip(before, gradients(1), strict=True)])
    for wrong in ("1", 0, math.nan):
        with pytest.raises(InputError, match="it must be greater than 0"):
            update.clip_grad_norm_(wrong)


@pytest.mark.promise("keys of NAIVE and TORCH")
def test_zeros_are_reported():
    params = make_params()
    recipe = Recipe(torch.float16, torch.float16, False, True, DYNAMIC, count_zeros=True)
    update = make_update(params, OPTIMIZERS["sgd"], recipe)
    grads = gradients(0)
    grads[0][:2] = 0
    give(params, grads, 1024.0)
    assert update.step().num_zeros == 10


def test_verbose_logs_each_change_of_the_scale(caplog):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=LossScale(8.0, growth_interval=2, verbose=True)))
    with caplog.at_level("INFO", "halfmesh"):
        for step in range(2):
            take(update, params, step)
    assert "loss scale 8 -> 16" in caplog.text


def test_recipes_and_scales_that_cannot_work():
    with pytest.raises(ValueError, match="would compute in fp32"):
        Recipe(compute_dtype=torch.float16)
    with pytest.raises(ValueError, match="cannot work: it needs 0 < initial"):
        LossScale(growth_factor=0.1)
