"""An update is exactly what unscale, clip and step by hand would give; a skipped one leaves no trace."""

import copy
import functools
import math
import weakref

import pytest
import torch
from torch import optim

from halfmesh.amp import stepper
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.errors import InputError, NonFiniteError
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

SCALED, NAIVE_FP16 = Recipe(loss_scale=DYNAMIC), Recipe(torch.float16, torch.float16, False, True, DYNAMIC)
# One of each kind: fused and told of scale and verdict, or not; with and without state of its own.
KINDS = ["sgd", "sgd_momentum", "sgd_dampening", "adam_foreach", "adamw", "adamw_tensor_lr", "adagrad", "rmsprop"]


@pytest.mark.promise(
    "unscaling before you clip or change gradients",
    "always; `engine.unscale_gradients()`",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0], ids=["no_clip", "clip_bites", "clip_does_not"])
@pytest.mark.parametrize("name", KINDS)
def test_equals_unscale_clip_step_by_hand(name, max_norm):
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], Recipe(loss_scale=DYNAMIC), max_norm=max_norm)
    for step in range(6):
        scale = scale_of(update)
        expected = torch.cat([g.flatten() for g in gradients(step)]).double().norm().item()
        result = take(update, params, step)
        assert result.grad_norm == pytest.approx(expected, rel=1e-6)
        assert (result.loss_scale, result.skipped) == (scale, False)
    assert_close(params, by_hand(OPTIMIZERS[name], 6, max_norm)[0])


@pytest.fixture
def uninitialised_is_nan():
    """Memory that nobody has filled, which may hold zeros by chance, holds nan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", KINDS)
def test_skipped_steps_leave_no_trace(name, uninitialised_is_nan):
    """The first one, before there is any state, and a later one, in one element."""
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], Recipe(loss_scale=DYNAMIC), max_norm=100.0)
    for step, bad in enumerate([math.inf, 1.0, math.nan, 1.0]):
        before = copy.deepcopy(([p.data for p in params], update.optimizer.state_dict()["state"]))
        scale = scale_of(update)
        give(params, gradients(step // 2), scale)
        params[2].grad[0, 0, 0] *= bad
        assert update.step().skipped == (bad != 1.0)
        if bad != 1.0:
            assert scale_of(update) == scale / 2
            after = ([p.data for p in params], update.optimizer.state_dict()["state"])
            known = 2 if step else 1  # after the first one there may be state, of zeros
            torch.testing.assert_close(after[:known], before[:known], rtol=0, atol=0)
    assert update.skip_counter.skipped == 2
    assert_close(params, by_hand(OPTIMIZERS[name], 2)[0])


def test_momentum_that_begins_later_survives_a_first_step_that_is_skipped(uninitialised_is_nan):
    """As under a scheduler that cycles momentum."""
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], SCALED)
    update.optimizer.param_groups[0]["momentum"] = 0.9
    assert take(update, params, 0, math.inf).skipped
    for step in range(4):
        take(update, params, step)
    assert_close(params, by_hand(lambda params: optim.SGD(params, lr=0.1, momentum=0.9), 4)[0])


@pytest.mark.parametrize("bucket", [1, 25 * 2**20], ids=["in parts", "at once"])
@pytest.mark.parametrize("name", KINDS)
def test_masters_step_as_an_fp32_optimizer_would(name, bucket, monkeypatch):
    """The gradients are fp16, everything after them is fp32: the same as torch on the rounded gradients."""
    monkeypatch.setattr(stepper, "bucket_bytes", lambda *_: bucket)
    params, reference = make_params(), make_params()  # of which fp16 holds other numbers
    update, optimizer = make_update(params, OPTIMIZERS[name], NAIVE_FP16), OPTIMIZERS[name](reference)
    for step in range(4):
        scale = scale_of(update)
        give(params, gradients(step), scale)
        give(reference, [p.grad.float() / scale for p in params])
        update.step()
        optimizer.step()
    assert_close(held(update), reference)
    assert all(p.dtype == torch.float16 for p in params)
    assert_close(params, [master.half() for master in held(update)], 0, 0)


@pytest.mark.promise("20 bytes per parameter for Adam in fp16", "16 and one bucket", of="SageMaker", page="planning.md")
def test_one_master_gradient_at_a_time(monkeypatch):
    """While one part is stepped, no other part has an fp32 gradient, and its own fp16 gradient is gone."""
    monkeypatch.setattr(stepper, "bucket_bytes", lambda *_: 1)
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(torch.float16, torch.float16, False, True))
    alive = []

    @functools.wraps(optim.SGD.step)
    def step(optimizer):
        held = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        alive.append((len(held), sum(grad() is not None for grad in given)))

    monkeypatch.setattr(optim.SGD, "step", step)
    give(params, gradients(0))
    given = [weakref.ref(param.grad) for param in params]
    update.step()
    assert alive == [(1, 2), (1, 1), (1, 0)]


STATIC = Recipe(loss_scale=LossScale(initial=8.0, dynamic=False))
APEX = Recipe(loss_scale=LossScale(initial=8.0, dynamic=False, skips=False))


@pytest.mark.parametrize(
    ("recipe", "ending"),
    [
        (Recipe(loss_scale=LossScale(initial=8.0, min_scale=4.0)), "loss scale is 4"),
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
