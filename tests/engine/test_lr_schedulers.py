"""Every learning rate against its formula, written out; resume; several groups; refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from halfmesh.engine.lr_schedulers import (
    CosineAnnealingWarmupLR,
    LinearWarmupLR,
    MultiStepWarmupLR,
    PolynomialWarmupLR,
)
from halfmesh.errors import InputError

Make = Callable[[torch.optim.Optimizer], LRScheduler]
CASES: dict[str, Make] = {
    "linear": lambda opt: LinearWarmupLR(opt, warmup_steps=4, total_steps=12),
    "cosine": lambda opt: CosineAnnealingWarmupLR(opt, total_steps=12, warmup_steps=4, eta_min=0.1),
    "multistep": lambda opt: MultiStepWarmupLR(opt, total_steps=12, milestones=[9, 6], warmup_steps=4, gamma=0.5),
    "polynomial": lambda opt: PolynomialWarmupLR(opt, total_steps=12, warmup_steps=4, end_lr=0.1, power=2.0),
}


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


def test_linear_without_warmup_starts_at_the_base_rate() -> None:
    rates = first_group(lambda opt: LinearWarmupLR(opt, warmup_steps=0, total_steps=4), 6, rate=2.0)
    assert rates == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("total_steps", [1, 3, 5])
def test_linear_may_end_within_its_warmup(total_steps: int) -> None:
    rates = first_group(lambda opt: LinearWarmupLR(opt, warmup_steps=5, total_steps=total_steps), 9)
    assert rates == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 0, 0, 0, 0])


def test_cosine() -> None:
    up = [0.25, 0.5, 0.75, 1.0]
    down = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(9)]
    assert first_group(CASES["cosine"], 15) == pytest.approx([*up, *down, 0.1, 0.1])


def test_cosine_agrees_with_torch_where_there_is_no_warmup() -> None:
    def torch_cosine(opt: torch.optim.Optimizer) -> LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10, eta_min=0.2)

    def own(opt: torch.optim.Optimizer) -> LRScheduler:
        return CosineAnnealingWarmupLR(opt, total_steps=10, eta_min=0.2)

    assert first_group(own, 11) == pytest.approx(first_group(torch_cosine, 11))


def test_multistep() -> None:
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]
    assert first_group(CASES["multistep"], 14) == pytest.approx(expected)


def test_polynomial() -> None:
    up = [0.25, 0.5, 0.75, 1.0]
    down = [0.1 + 0.9 * (1 - step / 8) ** 2 for step in range(9)]
    assert first_group(CASES["polynomial"], 15) == pytest.approx([*up, *down, 0.1, 0.1])


def test_polynomial_defaults_are_a_line_to_1e_4() -> None:
    rates = first_group(lambda opt: PolynomialWarmupLR(opt, total_steps=2), 4)
    assert rates == pytest.approx([1.0, 0.50005, 1e-4, 1e-4])


@pytest.mark.parametrize("name", CASES)
def test_groups_keep_their_own_base_rate(name: str) -> None:
    optimizer = make_optimizer(1.0, 0.4)
    both = rates_of(CASES[name](optimizer), optimizer, 15)
    assert [rates[0] for rates in both] == first_group(CASES[name], 15)
    assert [rates[1] for rates in both] == first_group(CASES[name], 15, rate=0.4)
    assert len({rates[1] for rates in both}) > 3


@pytest.mark.parametrize("stop", [0, 3, 4, 7, 12, 14])
@pytest.mark.parametrize("name", CASES)
def test_resume_is_exact(name: str, stop: int) -> None:
    optimizer = make_optimizer(1.0, 0.4)
    whole = rates_of(CASES[name](optimizer), optimizer, 16)

    optimizer = make_optimizer(1.0, 0.4)
    scheduler = CASES[name](optimizer)
    rates_of(scheduler, optimizer, stop)
    saved: dict[str, Any] = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}

    optimizer = make_optimizer(1.0, 0.4)
    scheduler = CASES[name](optimizer)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    assert scheduler.get_last_lr() == whole[stop]
    assert scheduler.state_dict() == saved["scheduler"]
    assert rates_of(scheduler, optimizer, 16 - stop) == whole[stop:]


def test_the_state_is_plain_data(tmp_path: Any) -> None:
    optimizer = make_optimizer(1.0)
    for name, make in CASES.items():
        torch.save(make(optimizer).state_dict(), tmp_path / name)
        assert torch.load(tmp_path / name, weights_only=True)["total_steps"] == 12


def test_last_epoch_continues_on_an_optimizer_that_knows_its_base_rate() -> None:
    optimizer = make_optimizer(1.0)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    scheduler = LinearWarmupLR(optimizer, warmup_steps=4, total_steps=12, last_epoch=5)
    assert scheduler.get_last_lr() == pytest.approx([6 / 8])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda opt: LinearWarmupLR(opt, 1, 0), r"total_steps=0: expected a whole number of at least 1"),
        (lambda opt: LinearWarmupLR(opt, -1, 5), r"warmup_steps=-1: expected a whole number of at least 0"),
        (lambda opt: LinearWarmupLR(opt, 1, 5.5), r"total_steps=5.5: .*for epochs"),  # type: ignore[arg-type]
        (lambda opt: LinearWarmupLR(opt, True, 5), r"warmup_steps=True"),
        (lambda opt: CosineAnnealingWarmupLR(opt, 5, 5), r"warmup_steps=5 leaves no step of total_steps=5 to Cosine"),
        (lambda opt: PolynomialWarmupLR(opt, 5, 6), r"warmup_steps=6 leaves no step .* use LinearWarmupLR"),
        (lambda opt: MultiStepWarmupLR(opt, 5, [], 5), r"leaves no step of total_steps=5 to MultiStepWarmupLR"),
        (lambda opt: CosineAnnealingWarmupLR(opt, 5, eta_min=-0.1), r"eta_min=-0.1: expected .* at least 0"),
        (lambda opt: CosineAnnealingWarmupLR(opt, 5, eta_min=0.5), r"eta_min=0.5 is above .* 0.4 of parameter group 1"),
        (lambda opt: PolynomialWarmupLR(opt, 5, end_lr=0.5), r"end_lr=0.5 is above .* give end_lr <= 0.4"),
        (lambda opt: PolynomialWarmupLR(opt, 5, power=0), r"power=0 would not let the learning rate fall"),
        (lambda opt: MultiStepWarmupLR(opt, 9, [3], gamma=0), r"gamma=0 would not leave a positive"),
        (lambda opt: MultiStepWarmupLR(opt, 9, [0]), r"a milestone=0: expected a whole number"),
        (lambda opt: MultiStepWarmupLR(opt, 9, [2, 5], 3), r"milestones \[2\] lie within the warm-up of 3 steps"),
    ],
)
def test_refusals_leave_the_optimizer_untouched(make: Make, message: str) -> None:
    optimizer = make_optimizer(1.0, 0.4)
    with pytest.raises(InputError, match=message):
        make(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.4]
    assert "initial_lr" not in optimizer.param_groups[0]
