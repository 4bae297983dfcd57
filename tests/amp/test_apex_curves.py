"""Training under O0 to O3 against a hand-written reading of apex: losses, weights, loss scales, skipped steps."""

from __future__ import annotations

import pytest
import torch

import halfmesh
from tests.amp.apex_reference import INITIAL_SCALE, Apex
from tests.amp.apex_runs import (
    LEVELS,
    NETS,
    BatchNormMLP,
    assert_same,
    make_batches,
    make_optimizer,
    make_pair,
    set_scalers,
    train,
)

HUGE = 1e38  # times the loss scale it is inf, in any precision
MILD = 1e4  # gradients overflow in half precision only, and not all of them
UNFUSED = {"fused": False}  # torch's fused optimizers round in another order than its plain ones


def compare(
    engine: halfmesh.Engine, reference: Apex, factors: dict[int, float] | None = None, steps: int = 8
) -> list[bool]:
    """The same steps with both. Returns which of them were skipped."""
    batches = make_batches(steps)
    expected, curve = train(reference, batches, factors), train(engine, batches, factors)
    assert (curve.scales, curve.skipped) == (expected.scales, expected.skipped)
    torch.testing.assert_close(curve.losses, expected.losses, rtol=1e-6, atol=0, equal_nan=True)
    assert_same(engine, reference)
    return curve.skipped


@pytest.mark.parametrize(("optimizer", "loss_scale"), [("sgd", None), ("adam", "dynamic"), ("sgd", 128.0)])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_training_curve(opt_level, net, optimizer, loss_scale):
    """With a dynamic scale, two overflows: in some fp16 gradients, and in all gradients of any precision."""
    engine, reference = make_pair(NETS[net](), make_optimizer(optimizer), opt_level, UNFUSED, loss_scale=loss_scale)
    dynamic = reference.scalers[0].dynamic
    factors = ({6: HUGE} | ({} if opt_level == "O0" else {3: MILD})) if dynamic else {}
    skipped = compare(engine, reference, factors)
    assert all(skipped[step] for step in factors)
    assert any(skipped) == dynamic


@pytest.mark.parametrize(("opt_level", "max_loss_scale"), [("O0", 2.0**17), ("O1", 2.0**24), ("O2", 2.0**16)])
def test_growth(opt_level, max_loss_scale):
    """After 2000 steps without overflow, counted from the last one, and not beyond the ceiling."""
    keys = {"loss_scale": "dynamic", "max_loss_scale": max_loss_scale}
    engine, reference = make_pair(BatchNormMLP(), make_optimizer("sgd"), opt_level, UNFUSED, **keys)
    set_scalers(engine, reference, [(INITIAL_SCALE, 1997)])
    compare(engine, reference, factors={4: HUGE}, steps=6)
    set_scalers(engine, reference, [(INITIAL_SCALE, 1998)])
    assert compare(engine, reference, factors={1: HUGE}, steps=4)[1]
    assert reference.scalers[0].unskipped < 4, "this run was to have an overflow just before growth"


def test_floor_and_ceiling():
    """The ceiling lowers the first scale too. At the floor an overflow still skips."""
    keys = {"loss_scale": "dynamic", "min_loss_scale": 2.0**8, "max_loss_scale": 2.0**10}
    engine, reference = make_pair(BatchNormMLP(), make_optimizer("sgd"), "O2", UNFUSED, **keys)
    assert engine.loss_scales == (2.0**10,)
    assert compare(engine, reference, factors=dict.fromkeys(range(4), HUGE), steps=6) == [True] * 4 + [False] * 2
    assert engine.loss_scales == (2.0**8,)
