"""Clipping on the engine, and who advances the learning rate."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lr

import halfmesh
from halfmesh.errors import InputError
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
    sgd,
    step_on,
    train,
)

X, Y = make_data(8)


def halving(optimizer):
    return optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.promise("accumulation, and its rest at the end of an epoch")
@pytest.mark.promise("`clip_master_grads`", "`engine.clip_grad_norm_`", of="SageMaker", page="loop.md")
@pytest.mark.parametrize("mode", ["none", "torch_fp16", "naive_fp16"])
def test_clip_grad_norm_on_the_engine(mode):
    """The last cycle is a short one."""
    engine = make_engine(MODES[mode] | {"gradient_accumulation": 2}, loader=make_loader(20, 4))
    with pytest.raises(InputError, match=r"clip_grad_norm_ was called before the last engine.backward"):
        engine.clip_grad_norm_(1.0)
    x, y = make_data(20)
    expected = MLP()
    optimizer = sgd(expected.parameters())
    for i, (a, b) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(a), b))
        if i in (0, 2):
            with pytest.raises(InputError, match=r"after microbatch 1 of 2., when gradients are incomplete"):
                engine.clip_grad_norm_(0.3)
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
    scheduler = halfmesh.LinearWarmupLR(optimizer, warmup_steps=2, total_steps=10)
    engine = make_engine(FP16_NAIVE, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    assert len({r.lr for r in train(engine)}) == 6
    assert engine.lr_scheduler is scheduler


def chained(optimizer):
    return lr.ChainedScheduler([halving(optimizer), lr.ConstantLR(optimizer, 0.5, 3)])


def each_batch(engine, step):
    for number, (x, y) in enumerate(engine.dataloader):
        step_on(engine, x, y)
        step(number)


def each_epoch(engine, step):
    for number in range(2):
        train(engine)
        step(number)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("interval", "make", "loop"),
    [
        ("step", chained, each_batch),
        ("step", lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=10), each_batch),
        ("epoch", halving, each_batch),
        ("epoch", lambda optimizer: lr.ChainedScheduler([chained(optimizer)]), each_epoch),
    ],
)
def test_a_scheduler_stepped_by_hand_as_well(interval, make, loop):
    config = FP16_TORCH | {"lr_interval": interval, "gradient_accumulation": 4 if loop is each_epoch else 1}
    engine = make_engine(config, loader=make_loader(24, 4), lr_scheduler=make)
    takes_epoch, step = isinstance(engine.lr_scheduler, lr.CosineAnnealingWarmRestarts), engine.lr_scheduler.step
    with pytest.raises(InputError, match=r"was called outside the engine, .* lr_interval='manual'"):
        loop(engine, lambda number: step(number / 6) if takes_epoch else step())


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
