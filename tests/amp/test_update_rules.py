"""Clipping, skipping, raising, watching: what an update does besides stepping."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.errors import InputError, NonFiniteError
from tests.support.updates import (
    DYNAMIC,
    OPTIMIZERS,
    CountReads,
    assert_close,
    by_hand,
    give,
    gradients,
    make_params,
    make_update,
)


def test_on_nonfinite_raise_names_the_parameter():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], on_nonfinite="raise")
    grads = gradients(0)
    grads[1][0] = math.nan
    give(params, grads)
    with pytest.raises(NonFiniteError, match=r"gradients hold inf or nan; the first .* is 'p1'; no loss scaling"):
        update.step()


def test_on_nonfinite_skip_without_scaling():
    params = make_params()
    before = copy.deepcopy(params)
    update = make_update(params, OPTIMIZERS["sgd"], on_nonfinite="skip")
    give(params, [g * math.inf for g in gradients(0)])
    assert update.step().skipped
    assert_close(params, before, 0, 0)


def test_on_nonfinite_auto_steps_without_a_dynamic_scale():
    params = make_params()
    static = Recipe(loss_scale=LossScale(initial=128.0, dynamic=False))
    update = make_update(params, OPTIMIZERS["sgd"], static)
    give(params, [g * math.nan for g in gradients(0)])
    assert not update.step().skipped
    assert params[0].isnan().all()


@pytest.mark.parametrize(
    ("recipe", "ending"),
    [
        (Recipe(loss_scale=LossScale(initial=8.0, min_scale=4.0)), "has reached its floor, 4"),
        (Recipe(loss_scale=LossScale(initial=8.0)), "has fallen to 2"),
        (Recipe(loss_scale=LossScale(initial=8.0, dynamic=False)), "is static at 8"),
        (FP32, "no loss scaling is in use"),
    ],
)
def test_a_storm_of_skips_stops_with_a_diagnosis(recipe, ending):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], recipe, max_consecutive_skips=3, max_norm=1.0)
    give(params, gradients(0))
    update.step()
    for _ in range(2):
        give(params, [gradients(0)[0], gradients(0)[1], gradients(0)[2] * math.nan])
        update.step()
    give(params, [gradients(0)[0], gradients(0)[1], gradients(0)[2] * math.nan])
    with pytest.raises(NonFiniteError, match=r"3 updates in a row .*\(max_consecutive_skips=3\)") as caught:
        update.step()
    assert "the first parameter with a non-finite gradient is 'p2'" in str(caught.value)
    assert ending in str(caught.value)


def test_skips_that_are_not_in_a_row_do_not_stop():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=DYNAMIC), max_consecutive_skips=2)
    for step in range(8):
        give(params, [g * (math.inf if step % 2 else 1.0) for g in gradients(step)])
        assert update.step().skipped == bool(step % 2)
    assert update.watch.skipped == 4


@pytest.mark.parametrize("recipe", [FP32, Recipe(loss_scale=DYNAMIC)])
def test_the_watch_never_waits_for_a_device(recipe):
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], recipe, max_consecutive_skips=4)
    for step in range(12):
        give(params, gradients(step))
        with CountReads() as counter:
            update.step()
        assert counter.reads == 0


@pytest.mark.parametrize("recipe", [FP32, Recipe(loss_scale=DYNAMIC)])
def test_on_a_gpu_a_storm_stops_one_update_later(recipe):
    """The count is on its way to the host meanwhile, and good updates in between begin a new one."""
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], recipe, max_consecutive_skips=3)
    update.watch._late = True
    bad = [False, True, True, False, False, True, True, False, True, True, True]
    if recipe is FP32:  # nothing else measures: the third update is looked at, and from the sixth on each
        bad = [False] * 5 + [True] * 3
    for step, is_bad in enumerate(bad):
        give(params, [g * (math.inf if is_bad else 1.0) for g in gradients(step)])
        update.step()
    give(params, gradients(0))
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        update.step()


def test_on_a_gpu_a_count_on_its_way_is_dropped_when_another_is_loaded():
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], Recipe(loss_scale=DYNAMIC), max_consecutive_skips=1)
    update.watch._late = True
    saved = update.state_dict()
    give(params, [g * math.inf for g in gradients(0)])
    update.step()
    update.load_state_dict(saved)
    give(params, gradients(0))
    assert not update.step().skipped


def test_clip_for_one_update():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=DYNAMIC), max_norm=100.0)
    give(params, gradients(0), 1024.0)
    norm = update.clip_grad_norm_(0.25)
    assert norm.item() == pytest.approx(torch.cat([g.flatten() for g in gradients(0)]).norm().item(), rel=1e-6)
    update.step()
    assert_close(params, by_hand(OPTIMIZERS["sgd"], 1, 0.25)[0])
    give(params, gradients(1), 1024.0)
    before = copy.deepcopy(params)
    update.step()
    expected = [b - 0.1 * g for b, g in zip(before, gradients(1), strict=True)]
    assert_close(params, expected)
    with pytest.raises(InputError, match="max_norm must be greater than 0, but -1 was given"):
        update.clip_grad_norm_(-1)


def test_inf_norm_clips_by_the_largest_element():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], max_norm=0.1, norm_type=math.inf)
    before = copy.deepcopy(params)
    give(params, gradients(0))
    largest = max(g.abs().max().item() for g in gradients(0))
    assert update.step().grad_norm == pytest.approx(largest, rel=1e-6)
    expected = [b - 0.1 * g * 0.1 / largest for b, g in zip(before, gradients(0), strict=True)]
    assert_close(params, expected, 1e-5, 1e-6)


def test_zeros_are_reported():
    params = make_params()
    recipe = Recipe(torch.float16, torch.float16, False, True, DYNAMIC, count_zeros=True)
    update = make_update(params, OPTIMIZERS["sgd"], recipe)
    grads = gradients(0)
    grads[0][:2] = 0
    give(params, grads, 1024.0)
    assert update.step().num_zeros == 10


def test_divisor():
    for recipe in (FP32, Recipe(loss_scale=DYNAMIC)):
        for divisor in (0.5, torch.tensor(0.5, dtype=torch.float64)):
            params = make_params()
            update = make_update(params, OPTIMIZERS["sgd"], recipe)
            scale = update.scaler.scale.item() if update.scaler else 1.0
            give(params, gradients(0), 0.5 * scale)
            update.step(divisor)
            assert_close(params, by_hand(OPTIMIZERS["sgd"], 1)[0])


def test_verbose_logs_each_change_of_the_scale(caplog):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=LossScale(8.0, growth_interval=2, verbose=True)))
    with caplog.at_level("INFO", "halfmesh"):
        for step in range(2):
            give(params, gradients(step))
            update.step()
    assert "loss scale 8 -> 16" in caplog.text


def test_a_backward_after_the_clip_is_measured_again():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=DYNAMIC))
    update.backward(sum((p * g).sum() for p, g in zip(params, gradients(0), strict=True)))
    update.clip_grad_norm_(0.5)
    update.backward(params[0].sum() * math.inf)
    assert update.step().skipped


def test_zero_grad_forgets_the_clip():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"])
    give(params, gradients(0))
    update.clip_grad_norm_(0.01)
    update.zero_grad()
    give(params, gradients(0))
    update.step()
    assert_close(params, by_hand(OPTIMIZERS["sgd"], 1)[0])


@pytest.mark.parametrize("clip", ["1", 0, -1.0, math.nan, None])
def test_norms_that_are_none(clip):
    params = make_params()
    give(params, gradients(0))
    with pytest.raises(InputError, match="max_norm must be greater than 0"):
        make_update(params, OPTIMIZERS["sgd"]).clip_grad_norm_(clip)


@pytest.mark.parametrize("recipe", [FP32, Recipe(loss_scale=LossScale(8.0, dynamic=False))])
def test_nan_is_noticed_even_if_nothing_asks_for_a_verdict(recipe):
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], recipe, max_consecutive_skips=5)
    reads = []
    for _step in range(8):
        give(params, [g * math.nan for g in gradients(0)])
        with CountReads() as counter:
            assert update.step().grad_norm is None
        reads.append(counter.reads)
    assert reads[:4] == [0, 0, 0, 0]
    give(params, [g * math.nan for g in gradients(0)])
    with pytest.raises(NonFiniteError, match="5 updates in a row"):
        update.step()


def test_a_look_now_and_then_costs_one_read():
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], max_consecutive_skips=4)
    measured = []
    for step in range(12):
        give(params, gradients(step))
        with CountReads() as counter:
            update.step()
        measured.append(any("norm" in op for op in counter.ops))
    assert [i for i, look in enumerate(measured) if look] == [3, 7, 11]


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_edited_where_earlier_ones_are_kept_apart(backwards, caplog):
    """param.grad is all that there is of one backward, and of several the last one's."""
    params = make_params()
    recipe = Recipe(compute_dtype=torch.bfloat16, param_dtype=torch.bfloat16, master_weights=True, wide_gradients=True)
    update = make_update(params, OPTIMIZERS["sgd"], recipe)
    for _ in range(2):
        for _ in range(backwards):
            update.backward(sum(p.float().sum() for p in params))
        nn.utils.clip_grad_norm_(params, 1.0)
        update.step()
    assert caplog.text.count("those of the last backward alone") == (backwards > 1)


def test_gradients_edited_while_they_are_scaled(caplog):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=DYNAMIC))
    with caplog.at_level("WARNING", "halfmesh"):
        for _ in range(2):
            update.zero_grad()
            update.backward(sum(p.sum() for p in params))
            update.step()
        assert caplog.text == ""
        for _ in range(2):
            update.zero_grad()
            update.backward(sum(p.sum() for p in params))
            nn.utils.clip_grad_norm_(params, 1.0)
            update.step()
    assert caplog.text.count("gradients were changed between engine.backward and engine.step") == 1


def test_recipes_and_scales_that_cannot_work():
    for wrong in (
        {"compute_dtype": torch.float16},
        {"compute_dtype": torch.float16, "autocast": True, "param_dtype": torch.float16},
        {"master_weights": True},
    ):
        with pytest.raises(ValueError, match=r"would compute in fp32|two ways to compute|fp32 masters of fp32"):
            Recipe(**wrong)
    for wrong in ({"initial": -1.0}, {"initial": 1e60}, {"growth_factor": 0.1}, {"hysteresis": 0}):
        with pytest.raises(ValueError, match="cannot work: it needs 0 < initial"):
            LossScale(**wrong)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_step_leaves_grad_mode_as_it_was(enabled):
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], on_nonfinite="raise")
    before = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(enabled)
        give(params, gradients(0))
        update.step()
        assert torch.is_grad_enabled() == enabled
        params[0].grad[0] = math.inf
        with pytest.raises(NonFiniteError):
            update.step()
        assert torch.is_grad_enabled() == enabled
    finally:
        torch.set_grad_enabled(before)
