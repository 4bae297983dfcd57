"""The loss scaler against a plain model of its rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmesh.amp.loss_scaler import LossScaler
from halfmesh.amp.recipe import LossScale
from halfmesh.errors import InputError

CPU = torch.device("cpu")
SCALES = LossScale(initial=1024.0, growth_interval=3, hysteresis=2, min_scale=1.0, max_scale=4096.0)


def model_of_the_rule(options: LossScale, overflows: list[bool]) -> list[float]:
    """The rule in plain Python: the scale after each update."""
    scale, good, left, history = options.initial, 0, options.hysteresis, []
    for overflow in overflows:
        if overflow:
            good, left = 0, max(left - 1, 0)
            if left == 0:
                scale = max(scale * options.backoff_factor, options.min_scale)
        else:
            good += 1
            if good == options.growth_interval:
                good, left = 0, options.hysteresis
                scale = min(scale * options.growth_factor, options.max_scale)
        history.append(scale)
    return history


def run(scaler: LossScaler, overflows: list[bool]) -> list[float]:
    history = []
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow)))
        history.append(scaler.scale.item())
    return history


@settings(max_examples=150, deadline=None)
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=40),
    growth_interval=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    floor=st.sampled_from([0.0, 1.0, 64.0]),
    ceiling=st.sampled_from([1024.0, 4096.0, 2.0**40]),
    factors=st.sampled_from([(2.0, 0.5), (4.0, 0.25), (2.0, 0.125)]),
)
def test_moves_as_the_rule_says(overflows, growth_interval, hysteresis, floor, ceiling, factors):
    options = LossScale(
        initial=1024.0,
        growth_factor=factors[0],
        backoff_factor=factors[1],
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        min_scale=floor,
        max_scale=ceiling,
    )
    assert run(LossScaler(options, CPU), overflows) == model_of_the_rule(options, overflows)


def test_hysteresis_example():
    scaler = LossScaler(LossScale(initial=1024.0, hysteresis=2), CPU)
    assert run(scaler, [True, False, False, True, True, True]) == [1024, 1024, 1024, 512, 256, 128]


def test_same_rule_as_torch_with_hysteresis_1():
    overflows = [bool(int(bit)) for bit in "0001001000000110000"]
    scale, tracker = torch.tensor(64.0), torch.tensor(0, dtype=torch.int32)
    expected = []
    for overflow in overflows:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 3)
        expected.append(scale.item())
    assert run(LossScaler(LossScale(initial=64.0, growth_interval=3), CPU), overflows) == expected


def test_static_scale_never_moves():
    scaler = LossScaler(LossScale(initial=128.0, dynamic=False, growth_interval=1), CPU)
    assert run(scaler, [True, False, False, True]) == [128.0] * 4


def test_state_dict_holds_every_tracker():
    overflows = [bool(int(bit)) for bit in "100110100010001"]
    whole = run(LossScaler(SCALES, CPU), overflows)
    for cut in range(len(overflows)):
        first, second = LossScaler(SCALES, CPU), LossScaler(SCALES, CPU)
        run(first, overflows[:cut])
        second.load_state_dict(first.state_dict())
        assert run(second, overflows[cut:]) == whole[cut:]


def test_cap_lowers_a_dynamic_scale_for_good():
    scaler = LossScaler(LossScale(initial=2.0**16, growth_interval=1), CPU)
    assert scaler.cap(2.0**15, "why")
    assert not scaler.cap(2.0**15, "why")
    assert run(scaler, [False, False]) == [2.0**15, 2.0**15]


def test_cap_refuses_a_static_scale_above_it():
    scaler = LossScaler(LossScale(initial=2.0**16, dynamic=False), CPU)
    with pytest.raises(InputError, match=r"static loss_scale 65536 cannot be used: why; the largest .* 32768"):
        scaler.cap(2.0**15, "why")
    assert not LossScaler(LossScale(initial=128.0, dynamic=False), CPU).cap(2.0**15, "why")


def test_without_a_floor_the_scale_stays_a_number():
    """Some 165 halvings take 2**16 to zero in fp32, by which no gradient can be divided."""
    scaler = LossScaler(LossScale(), torch.device("cpu"))
    for _ in range(300):
        scaler.update(torch.ones(()))
    assert scaler.scale.item() == 2.0**-126
