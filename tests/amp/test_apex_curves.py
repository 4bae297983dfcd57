"""Training under O0 to O3 against a hand-written reading of apex: losses, weights, loss scales, skipped steps."""

from __future__ import annotations

import pytest
import torch

import halfmesh
from tests.support.apex_reference import INITIAL_SCALE, Apex
from tests.support.apex_runs import (
    LEVELS,
    NETS,
    SHAPES,
    BatchNormMLP,
    ListsNet,
    assert_same,
    make_batches,
    make_optimizer,
    make_pair,
    set_scalers,
    train,
)

STEPS = 10
HUGE = 1e38  # times the loss scale it is inf, in any precision
MILD = 1e4  # gradients overflow in half precision only, and not all of them
UNFUSED = {"fused": False}  # torch's fused optimizers round in another order than its plain ones


def compare(
    engine: halfmesh.Engine, reference: Apex, net: str = "mlp", factors: dict[int, float] | None = None, steps=STEPS
) -> list[bool]:
    """The same steps with both. Returns which of them were skipped."""
    batches = make_batches(SHAPES[net], steps)
    expected, curve = train(reference, batches, factors), train(engine, batches, factors)
    assert curve.scales == expected.scales
    assert curve.skipped == expected.skipped
    torch.testing.assert_close(
        torch.tensor(curve.losses), torch.tensor(expected.losses), rtol=1e-6, atol=0, equal_nan=True
    )
    assert_same(engine, reference)
    return curve.skipped


@pytest.mark.parametrize("loss_scale", [None, 128.0, "dynamic"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_training_curve(opt_level, net, optimizer, loss_scale):
    """With a dynamic scale, two overflows: in some fp16 gradients, and in all gradients of any precision."""
    engine, reference = make_pair(NETS[net](), make_optimizer(optimizer), opt_level, UNFUSED, loss_scale=loss_scale)
    dynamic = reference.scalers[0].dynamic
    factors = ({6: HUGE} | ({} if opt_level == "O0" else {3: MILD})) if dynamic else {}
    skipped = compare(engine, reference, net, factors)
    assert all(skipped[step] for step in factors)
    assert any(skipped) == dynamic


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_fused_optimizers(opt_level, optimizer):
    """What the engine takes by itself. Under O3 they compute in fp32 and round once, so they end nearer to fp32."""
    engine, reference = make_pair(BatchNormMLP(), make_optimizer(optimizer), opt_level, loss_scale=128.0)
    if opt_level != "O3":
        compare(engine, reference)
        return
    batches = make_batches(SHAPES["mlp"], STEPS)
    in_fp32 = Apex(BatchNormMLP(), make_optimizer(optimizer), "O0")
    for run in (engine, reference, in_fp32):
        train(run, batches)
    expected = in_fp32.weights()
    near, far = (
        max((state[name] - expected[name]).abs().max() for name in expected)
        for state in (engine.state_dict()["model"], reference.weights())
    )
    assert near <= far


OVERRIDES = {
    "O2 without fp32 BatchNorm": ("O2", {"keep_batchnorm_fp32": False}),
    "O2 without masters": ("O2", {"master_weights": False}),
    "O3 with both": ("O3", {"master_weights": True, "keep_batchnorm_fp32": True, "loss_scale": "dynamic"}),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", OVERRIDES)
def test_overridden_levels(name, optimizer):
    opt_level, overrides = OVERRIDES[name]
    engine, reference = make_pair(BatchNormMLP(), make_optimizer(optimizer), opt_level, UNFUSED, **overrides)
    compare(engine, reference, "mlp", {3: MILD} if reference.scalers[0].dynamic else {})


@pytest.mark.parametrize("loss_scale", [128.0, "dynamic"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_functions_of_every_list_under_o1(optimizer, loss_scale):
    engine, reference = make_pair(ListsNet(), make_optimizer(optimizer), "O1", UNFUSED, loss_scale=loss_scale)
    skipped = compare(engine, reference, "lists", {4: MILD} if loss_scale == "dynamic" else {})
    assert skipped[4] == (loss_scale == "dynamic")


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_inputs_beyond_half_precision(opt_level):
    """The forward overflows, so the loss is nan. The run goes on; BatchNorm's statistics stay what it made of them."""
    engine, reference = make_pair(BatchNormMLP(), make_optimizer("sgd"), opt_level, UNFUSED, loss_scale="dynamic")
    batches = make_batches(SHAPES["mlp"], 6)
    batches[2][0][0, 0] = 1e6
    expected, curve = train(reference, batches), train(engine, batches)
    assert curve.skipped == expected.skipped == [step == 2 for step in range(6)]
    assert curve.scales == expected.scales
    torch.testing.assert_close(curve.losses, expected.losses, rtol=1e-6, atol=0, equal_nan=True)
    assert_same(engine, reference)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_static_scale_is_never_checked(opt_level):
    """The step with inf is made, in what it reaches and nowhere else."""
    factor = HUGE * 10 if opt_level == "O0" else MILD
    engine, reference = make_pair(BatchNormMLP(), make_optimizer("sgd"), opt_level, UNFUSED, loss_scale=4096.0)
    assert compare(engine, reference, factors={2: factor}, steps=3) == [False] * 3
    assert not all(value.isfinite().all() for value in engine.state_dict()["model"].values())
    assert engine.loss_scales == (4096.0,)


@pytest.mark.parametrize("max_loss_scale", [None, 2.0**16, 2.0**17])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_growth(opt_level, max_loss_scale):
    """After 2000 steps without overflow, counted from the last one, and not beyond the ceiling."""
    keys = {} if max_loss_scale is None else {"max_loss_scale": max_loss_scale}
    engine, reference = make_pair(
        BatchNormMLP(), make_optimizer("sgd"), opt_level, UNFUSED, loss_scale="dynamic", **keys
    )
    set_scalers(engine, reference, [(INITIAL_SCALE, 1997)])
    compare(engine, reference, factors={4: HUGE}, steps=6)
    set_scalers(engine, reference, [(INITIAL_SCALE, 1998)])
    skipped = compare(engine, reference, factors={1: HUGE}, steps=4)
    assert skipped[1]
    assert reference.scalers[0].unskipped < 4, "this run was to have an overflow just before growth"


@pytest.mark.parametrize("opt_level", LEVELS)
def test_floor_and_ceiling(opt_level):
    """The ceiling lowers the first scale too. At the floor an overflow still skips."""
    keys = {"loss_scale": "dynamic", "min_loss_scale": 2.0**8, "max_loss_scale": 2.0**10}
    engine, reference = make_pair(BatchNormMLP(), make_optimizer("sgd"), opt_level, UNFUSED, **keys)
    assert engine.loss_scales == (2.0**10,)
    batches = make_batches(SHAPES["mlp"], 6)
    curve = train(engine, batches, dict.fromkeys(range(4), HUGE))
    assert [scale for (scale,) in curve.scales] == [2.0**9, 2.0**8, 2.0**8, 2.0**8, 2.0**8, 2.0**8]
    assert curve.skipped == [True] * 4 + [False] * 2
    assert train(reference, batches, dict.fromkeys(range(4), HUGE)).scales == curve.scales
    assert_same(engine, reference)
