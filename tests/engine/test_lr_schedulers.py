"""Every learning rate against its formula, written out; resume; several groups; rejections."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from halfmesh import CosineAnnealingWarmupLR, LinearWarmupLR, MultiStepWarmupLR, PolynomialWarmupLR
from halfmesh.errors import InputError

Make = Callable[[torch.optim.Optimizer], LRScheduler]
CASES: dict[str, Make] = {
    "linear": lambda opt: LinearWarmupLR(opt, warmup_steps=4, total_steps=12),
    "cosine": lambda opt: CosineAnnealingWarmupLR(opt, total_steps=12, warmup_steps=4, eta_min=0.1),
    "multistep": lambda opt: MultiStepWarmupLR(opt, total_steps=12, milestones=[9, 6], warmup_steps=4, gamma=0.5),
    "polynomial": lambda opt: PolynomialWarmupLR(opt, total_steps=12, warmup_steps=4, end_lr=0.1, power=2.0),
}
UP = [0.25, 0.5, 0.75, 1.0]


def make_optimizer(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def rates_of(scheduler: LRScheduler, optimizer: torch.optim.Optimizer, steps: int) -> list[list[float]]:
    """The rates that steps 0, 1, ... use, per group."""
    used = []
    for _ in range(steps):
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


def first_group(make: Make, steps: int, rate: float = 1.0) -> list[float]:
    optimizer = make_optimizer(rate)
    return [rates[0] for rates in rates_of(make(optimizer), optimizer, steps)]


def test_linear() -> None:
    up = [1 / 5, 2 / 5, 3 / 5, 4 / 5]
    down = [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0, 0]
    assert first_group(CASES["linear"], 15) == pytest.approx(up + down)
    rates = first_group(lambda opt: LinearWarmupLR(opt, warmup_steps=0, total_steps=4), 6, rate=2.0)
    assert rates == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0])
    rates = first_group(lambda opt: LinearWarmupLR(opt, warmup_steps=3, total_steps=50), 50, rate=3e-4)
    assert rates[3:] == [3e-4 * (50 - step) / 47 for step in range(3, 50)], "to the bit, as the formula is written"
    within_warmup = first_group(lambda opt: LinearWarmupLR(opt, warmup_steps=5, total_steps=3), 7)
    assert within_warmup == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 0, 0])


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("cosine", [*(0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(9)), 0.1, 0.1]),
        ("multistep", [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]),
        ("polynomial", [*(0.1 + 0.9 * (1 - step / 8) ** 2 for step in range(9)), 0.1, 0.1]),
    ],
)
def test_warm_up_and_decay(name: str, after: list[float]) -> None:
    assert first_group(CASES[name], 4 + len(after)) == pytest.approx(UP + after)


@pytest.mark.parametrize("name", CASES)
def test_resume_is_exact_and_groups_keep_their_own_base_rate(name: str) -> None:
    optimizer = make_optimizer(1.0, 0.4)
    scheduler = CASES[name](optimizer)
    whole = rates_of(scheduler, optimizer, 7)
    assert [rates[1] for rates in whole] == first_group(CASES[name], 7, rate=0.4)
    saved = optimizer.state_dict(), scheduler.state_dict()
    optimizer = make_optimizer(1.0, 0.4)
    resumed = CASES[name](optimizer)
    optimizer.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    rest = [rates[1] for rates in rates_of(resumed, optimizer, 9)]
    assert rest == first_group(CASES[name], 16, rate=0.4)[7:]


def test_no_steps_are_rejected() -> None:
    with pytest.raises(InputError, match=r"total_steps=0: expected 1 or more, counted in optimizer steps"):
        LinearWarmupLR(make_optimizer(1.0), 0, 0)
