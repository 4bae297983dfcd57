"""Clipping on the engine; learning rates against their formulas, who advances them, and the updates of an epoch."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import halfmesh
from halfmesh import CosineAnnealingWarmupLR, LinearWarmupLR, MultiStepWarmupLR, PolynomialWarmupLR
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import (
    FP16_NAIVE,
    FP16_TORCH,
    MLP,
    MODES,
    TOLERANCES,
    adamw,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    said,
    sgd,
    step_on,
    train,
)
from tests.support.ranks import rank_device, run_ranks

X, Y = make_data(8)


def halving(optimizer):
    return lr.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.promise("accumulation, and its rest at the end of an epoch")
@pytest.mark.promise("`clip_master_grads`", "`engine.clip_grad_norm_`", of="SageMaker", page="loop.md")
@pytest.mark.parametrize("mode", ["none", "torch_fp16", "naive_fp16"])
def test_clip_grad_norm_on_the_engine(mode):
    """The last cycle is a short one."""
    engine = make_engine(MODES[mode] | {"gradient_accumulation": 2}, loader=make_loader(20, 4))
    assert "clip_grad_norm_ was called before the last engine.backward" in said(engine.clip_grad_norm_, 1.0)
    x, y = make_data(20)
    expected = MLP()
    optimizer = sgd(expected.parameters())
    for i, (a, b) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(a), b))
        if i in (0, 2):
            assert "after microbatch 1 of 2), when gradients are incomplete" in said(engine.clip_grad_norm_, 0.3)
        else:
            optimizer.zero_grad()
            part = slice(i // 2 * 8, (i + 1) * 4)
            nn.functional.cross_entropy(expected(x[part]), y[part]).backward()
            norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
            assert engine.clip_grad_norm_(0.3).item() == pytest.approx(norm.item(), rel=5e-3)
            optimizer.step()
        engine.step()
    assert difference(full_weights(engine), expected) < TOLERANCES[mode]


@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
def test_lr_of_every_update_skips_not_counted(mode):
    engine = make_engine(MODES[mode], lr_scheduler=halving)
    rates = []
    for i in range(6):
        loss = engine.criterion(engine(X), Y)
        engine.zero_grad()
        engine.backward(loss * math.inf if i in (0, 3) and mode != "none" else loss)
        rates.append(engine.step().lr)
    taken = range(6) if mode == "none" else (0, 0, 1, 2, 2, 3)
    assert rates == pytest.approx([0.05 * 0.5**steps for steps in taken])
    if mode == "none":  # nothing can be skipped, so nothing has to be waited for
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**6)
    engine.state_dict()  # settles the last one
    assert engine.lr_scheduler.get_last_lr()[0] == pytest.approx(0.05 * 0.5 ** (6 if mode == "none" else 4))


def test_an_epoch_ends_for_a_loop_that_counts_its_batches():
    """It never asks for the batch that is not there. Epochs that were left early, or only looked at, do not end."""
    engine = make_engine({"lr_interval": "epoch", "gradient_accumulation": 4}, lr_scheduler=halving)
    count = len(engine.dataloader)
    for epoch in range(1, 3):
        for x, y in itertools.islice(engine.dataloader, count):
            step_on(engine, x, y)
        assert engine.lr_scheduler.last_epoch == epoch
    for number, (x, y) in enumerate(engine.dataloader):
        if number == count - 1:  # the last one is handed out, and not trained on
            break
        step_on(engine, x, y)
    with torch.no_grad():
        assert len(list(itertools.islice(engine.dataloader, count))) == count
    assert engine.lr_scheduler.last_epoch == 2


@pytest.mark.promise(
    "schedulers need the inner optimizer, created after sharding", "lifted: yours work", of="SageMaker", page="loop.md"
)
def test_a_scheduler_given_as_an_object_keeps_working_on_masters():
    model = MLP()
    optimizer = adamw(model.parameters())
    scheduler = LinearWarmupLR(optimizer, warmup_steps=2, total_steps=10)
    engine = make_engine(FP16_NAIVE, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    assert len({r.lr for r in train(engine)}) == 6
    assert engine.lr_scheduler is scheduler


def chained(optimizer):
    return lr.ChainedScheduler([halving(optimizer), lr.ConstantLR(optimizer, 0.5, 3)])


def each_batch(engine, step):
    for number, (x, y) in enumerate(engine.dataloader):
        step_on(engine, x, y)
        step(number)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("interval", "make"),
    [("step", chained), ("step", lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=10)), ("epoch", halving)],
)
def test_a_scheduler_stepped_by_hand_as_well(interval, make):
    config = FP16_TORCH | {"lr_interval": interval}
    engine = make_engine(config, loader=make_loader(24, 4), lr_scheduler=make)
    takes_epoch, step = isinstance(engine.lr_scheduler, lr.CosineAnnealingWarmRestarts), engine.lr_scheduler.step
    with pytest.raises(InputError, match=r"was called outside the engine, .* lr_interval='manual'"):
        each_batch(engine, lambda number: step(number / 6) if takes_epoch else step())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("interval", "make", "steps"), [("step", chained, 12), ("epoch", halving, 2), ("manual", halving, 0)]
)
def test_a_scheduler_loaded_or_moved_on_by_hand(interval, make, steps):
    """As a loop resumes from files of its own, or goes back to an earlier state after a bad step."""
    engine = make_engine({"lr_interval": interval}, loader=make_loader(24, 4), lr_scheduler=make)
    scheduler = engine.lr_scheduler
    scheduler.step()
    train(engine)
    state = copy.deepcopy(scheduler.state_dict())
    train(engine, epochs=2)
    scheduler.load_state_dict(state)
    train(engine)
    scheduler = scheduler._schedulers[0] if make is chained else scheduler
    assert scheduler.last_epoch == 1 + steps
    if interval == "manual":
        each_batch(engine, lambda _: scheduler.step())
        assert scheduler.last_epoch == 7


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
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return optim.SGD(groups, lr=1.0)


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


DATA = list(zip(*make_data(27), strict=True))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def counted(rank, world_size):
    """What was said before `initialize`, what the scheduler was told, and the updates of an epoch."""
    found = []
    for layout, accumulated in itertools.product(("dp2", "tp2"), ("gradient_accumulation", "global_batch_size")):
        size = 2 if accumulated == "gradient_accumulation" else 24
        config = halfmesh.load_config({"parallel": LAYOUTS[layout][1], accumulated: size})
        launch = halfmesh.Launch(config, rank_device(), rank, world_size, rank)
        if size == 2:
            loader = DataLoader(DATA, 2, sampler=DistributedSampler(DATA, launch.dp_size, rank % launch.dp_size))
        else:
            loader = DataLoader(DATA, 4, shuffle=layout == "dp2", drop_last=layout == "tp2")
        told = []

        def scheduler(optimizer, updates_per_epoch, told=told):
            told.append(updates_per_epoch)
            return LinearWarmupLR(optimizer, warmup_steps=1, total_steps=2 * updates_per_epoch)

        updates = launch.updates_per_epoch(loader)
        given = Net(norm=nn.LayerNorm), sgd, nn.functional.cross_entropy, loader, launch
        with halfmesh.initialize(*given, lr_scheduler=scheduler) as engine:
            train(engine)
            found.append((updates, *told, engine.global_step))
    return found


@pytest.mark.distributed
def test_updates_per_epoch_are_those_of_an_epoch():
    for found in run_ranks(counted, 2):
        assert all(numbers[0] > 0 and numbers == numbers[:1] * 3 for numbers in found), found


def test_a_value_that_the_user_bound_is_kept_and_what_has_no_length():
    """The value also without a dataloader, whose updates would be counted."""

    def make(optimizer, updates_per_epoch):
        return lr.StepLR(optimizer, updates_per_epoch)

    bound = functools.partial(make, updates_per_epoch=100)
    with halfmesh.initialize(nn.Linear(2, 2), sgd, config={}, lr_scheduler=bound, device="cpu") as engine:
        assert engine.lr_scheduler.step_size == 100
    launch = halfmesh.Launch(halfmesh.load_config({}), torch.device("cpu"), 0, 1, 0)
    for given, kind in ((DataLoader(Stream(), 4), "Stream"), (DATA, "list")):
        with pytest.raises(InputError, match=rf"updates per epoch is unknown: {kind} is no torch DataLoader, or a"):
            launch.updates_per_epoch(given)
