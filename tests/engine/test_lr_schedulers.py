"""Every learning rate against its formula, written out; resume; several groups; rejections."""

from __future__ import annotations

import math

import pytest
import torch

from halfmesh import CosineAnnealingWarmupLR, LinearWarmupLR, MultiStepWarmupLR, PolynomialWarmupLR
from halfmesh.errors import InputError

CASES = {
    "linear": lambda opt: LinearWarmupLR(opt, warmup_steps=4, total_steps=12),
    "cosine": lambda opt: CosineAnnealingWarmupLR(opt, total_steps=12, warmup_steps=4, eta_min=0.1),
    "multistep": lambda opt: MultiStepWarmupLR(opt, total_steps=12, milestones=[9, 6], warmup_steps=4, gamma=0.5),
    "polynomial": lambda opt: PolynomialWarmupLR(opt, total_steps=12, warmup_steps=4, end_lr=0.1, power=2.0),
}
UP = [0.25, 0.5, 0.75, 1.0]
RATES = {
    "linear": [1 / 5, 2 / 5, 3 / 5, 4 / 5, *(1 - step / 8 for step in range(9)), 0, 0],
    "cosine": [*UP, *(0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(9)), 0.1, 0.1],
    "multistep": [*UP, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25],
    "polynomial": [*UP, *(0.1 + 0.9 * (1 - step / 8) ** 2 for step in range(9)), 0.1, 0.1],
}


def make_optimizer(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def rates_of(scheduler, optimizer, steps):
    """The rates that steps 0, 1, ... use, per group."""
    used = []
    for _ in range(steps):
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


def first_group(make, steps, rate=1.0):
    optimizer = make_optimizer(rate)
    return [rates[0] for rates in rates_of(make(optimizer), optimizer, steps)]


@pytest.mark.parametrize("name", CASES)
def test_formulas_resume_and_groups_with_a_base_rate_of_their_own(name):
    assert first_group(CASES[name], len(RATES[name])) == pytest.approx(RATES[name])
    optimizer = make_optimizer(1.0, 0.4)
    scheduler = CASES[name](optimizer)
    whole = rates_of(scheduler, optimizer, 7)
    assert [rates[1] for rates in whole] == first_group(CASES[name], 7, rate=0.4)
    saved = optimizer.state_dict(), scheduler.state_dict()
    optimizer = make_optimizer(1.0, 0.4)
    resumed = CASES[name](optimizer)
    optimizer.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert [rates[1] for rates in rates_of(resumed, optimizer, 9)] == first_group(CASES[name], 16, rate=0.4)[7:]


def test_linear_to_the_bit_and_without_warm_up():
    rates = first_group(lambda opt: LinearWarmupLR(opt, warmup_steps=3, total_steps=50), 50, rate=3e-4)
    assert rates[3:] == [3e-4 * (50 - step) / 47 for step in range(3, 50)]
    rates = first_group(lambda opt: LinearWarmupLR(opt, warmup_steps=0, total_steps=4), 6, rate=2.0)
    assert rates == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0])
    with pytest.raises(InputError, match=r"total_steps=0: expected 1 or more, counted in optimizer steps"):
        LinearWarmupLR(make_optimizer(1.0), 0, 0)
