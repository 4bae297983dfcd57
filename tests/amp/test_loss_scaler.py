"""The loss scaler against a plain model of its rule."""

import itertools
import random

import pytest
import torch
from torch import nn

from halfmesh.amp.loss_scaler import LossScaler
from halfmesh.amp.recipe import LossScale

CPU = torch.device("cpu")


def model_of_the_rule(options, overflows):
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


def run(scaler, overflows):
    history = []
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow)))
        history.append(scaler.scale.item())
    return history


@pytest.mark.promise("loss scaling under tensor and pipeline")
def test_moves_as_the_rule_says():
    draw = random.Random(0)
    for _ in range(60):
        factors, counts = draw.choice([(2.0, 0.5), (4.0, 0.25), (2.0, 0.125)]), (draw.randint(1, 6), draw.randint(1, 4))
        bounds = draw.choice([0.0, 1.0, 64.0]), draw.choice([1024.0, 4096.0, 2.0**40])
        options, share = LossScale(1024.0, True, *factors, *counts, *bounds), draw.random()
        overflows = [draw.random() < share for _ in range(40)]
        assert run(LossScaler(options, CPU), overflows) == model_of_the_rule(options, overflows), (options, overflows)


@pytest.mark.promise("the loop with autocast and GradScaler")
@pytest.mark.parametrize(
    ("start", "growth", "backoff", "interval"),
    [(2.0**16, 2.0, 0.5, 1), (1000.1, 2.0, 0.5, 3), (2.0**16, 1.1, 0.9, 2), (1000.1, 3.7, 1e-3, 1)],
)
def test_same_rule_as_torch_with_hysteresis_1(start, growth, backoff, interval):
    """Also where growth would give inf, and the scale stays."""
    options = LossScale(start, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    scaler = LossScaler(options, CPU)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=start, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for overflows in itertools.islice(itertools.cycle([0, 0, 0, 0, 1, 0, 1, 1, 0]), 40):
        theirs.scale(torch.ones(1))
        param.grad = torch.full((1,), torch.inf if overflows else 0.0)
        theirs.step(optimizer)
        theirs.update()
        scaler.update(torch.tensor(float(overflows)))
        state = scaler.state_dict()
        expected = max(theirs.get_scale(), 2.0**-126), theirs._get_growth_tracker()
        assert (state["scale"], state["growth_tracker"]) == expected


def test_the_bounds_are_those_of_the_config_that_loads():
    low, high = LossScaler(LossScale(64.0, max_scale=64.0), CPU), LossScaler(LossScale(64.0, growth_interval=1), CPU)
    high.load_state_dict(low.state_dict())
    assert run(high, [False] * 3) == [128.0, 256.0, 512.0]
    low.load_state_dict(high.state_dict() | {"hysteresis_left": 8})
    assert (low.scale, low.state_dict()["hysteresis_left"]) == (64.0, low.options.hysteresis)


def test_without_a_floor_the_scale_stays_a_number():
    """Some 165 halvings take 2**16 to zero in fp32, by which no gradient can be divided."""
    scaler = LossScaler(LossScale(), CPU)
    assert run(scaler, [True] * 300)[-1] == 2.0**-126
