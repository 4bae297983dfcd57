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
    reference,
    sgd,
    step_on,
    train,
)
from tests.support.ranks import here, run_ranks

X, Y = make_data(8)


def halving(optimizer):
    return optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.promise(
    "`clip_master_grads`",
    "`engine.clip_grad_norm_(max_norm)`, or the config",
    of="SageMaker",
    page="loop.md",
)
@pytest.mark.parametrize("mode", ["none", "torch_fp16", "naive_fp16"])
def test_clip_grad_norm_on_the_engine(mode):
    engine = make_engine(MODES[mode] | {"gradient_accumulation": 2}, loader=make_loader(24, 4))
    with pytest.raises(InputError, match=r"clip_grad_norm_ was called before engine.backward"):
        engine.clip_grad_norm_(1.0)
    x, y = make_data(24)
    expected = reference([])
    optimizer = sgd(expected.parameters())
    for i, (a, b) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(a), b))
        if i % 2 == 0:
            with pytest.raises(InputError, match=r"after 1 of 2.: gradients are incomplete"):
                engine.clip_grad_norm_(0.3)
        else:
            optimizer.zero_grad()
            part = slice((i - 1) * 4, (i + 1) * 4)
            nn.functional.cross_entropy(expected(x[part]), y[part]).backward()
            norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
            assert engine.clip_grad_norm_(0.3).item() == pytest.approx(norm.item(), rel=5e-3)
            optimizer.step()
        engine.step()
    assert difference(full_weights(engine), expected) < TOLERANCES[mode]


def clipped_then_changed(rank, world_size, mode, factor, parallel):
    """Whether an update was skipped whose gradients rank 1 changed after clipping, and its norm."""
    engine = make_engine(MODES[mode] | {"parallel": parallel}, loader=make_loader(8, 4))
    for _ in range(2):
        engine.backward(engine.criterion(engine(here(X)), here(Y)))
        norm = engine.clip_grad_norm_(0.3)
        if rank == world_size - 1:
            engine.model.last.weight.grad[0].mul_(factor)
        result = engine.step()
    assert result.grad_norm == pytest.approx(norm.item())
    return result.skipped, full_weights(engine)


@pytest.mark.parametrize("mode", ["torch_fp16", "naive_fp16"])
def test_gradients_that_are_changed_after_clipping_are_judged_again(mode):
    assert clipped_then_changed(0, 1, mode, math.inf, {})[0]
    skipped, found = clipped_then_changed(0, 1, mode, 2.0, {})
    expected = MLP()
    optimizer = sgd(expected.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(X), Y).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
        expected.last.weight.grad[0].mul_(2)
        optimizer.step()
    assert not skipped
    assert difference(found, expected) < TOLERANCES[mode]


@pytest.mark.distributed
@pytest.mark.sends
def test_gradients_of_one_rank_are_judged_by_all():
    pipeline = {"pipeline": {"size": 2, "microbatches": 2, "partition": ("last",)}}
    for mode in ("torch_fp16", "naive_fp16"):
        assert [skipped for skipped, _ in run_ranks(clipped_then_changed, 2, mode, math.inf, pipeline)] == [True] * 2


@pytest.mark.promise("schedulers need the inner optimizer")
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


@pytest.mark.parametrize(
    ("interval", "advanced", "words"),
    [("step", 12, "after each update"), ("epoch", 2, "after each epoch"), ("manual", 0, "advanced by the loop")],
)
def test_lr_interval(interval, advanced, words):
    engine = make_engine(FP16_TORCH | {"lr_interval": interval}, lr_scheduler=halving)
    assert f"StepLR {words}" in engine.plan.rows["update"]
    train(engine, epochs=2)
    assert engine.lr_scheduler.last_epoch == advanced


def by_next(loader):
    batches = iter(loader)
    return (next(batches) for _ in range(len(loader)))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("counted", [by_next, lambda loader: itertools.islice(loader, len(loader))])
def test_an_epoch_ends_for_a_loop_that_counts_its_batches(counted, accumulation):
    """It never asks for the batch that is not there. Epochs that were left early, or only looked at, do not end."""
    engine = make_engine({"lr_interval": "epoch", "gradient_accumulation": accumulation}, lr_scheduler=halving)

    def train(batches, until=math.inf):
        for number, (x, y) in enumerate(batches):
            if number == until:
                return
            step_on(engine, x, y)

    for epoch in range(1, 3):
        train(counted(engine.dataloader))
        assert engine.lr_scheduler.last_epoch == epoch
    train(engine.dataloader, until=len(engine.dataloader) - 1)  # the last one is handed out, and not trained on
    assert engine.lr_scheduler.last_epoch == 2
    with torch.no_grad():
        assert len(list(counted(engine.dataloader))) == len(engine.dataloader)
    assert engine.lr_scheduler.last_epoch == 2


@pytest.mark.promise(
    "schedulers need the inner optimizer",
    "lifted: a scheduler of your own optimizer works",
    of="SageMaker",
    page="loop.md",
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


def warmed_up(optimizer):
    return lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), halving(optimizer)], milestones=[2])


def restarting(optimizer):
    return lr.CosineAnnealingWarmRestarts(optimizer, T_0=10)


def each_batch(engine, scheduler):
    for number, (x, y) in enumerate(engine.dataloader):
        step_on(engine, x, y)
        scheduler.step(*([number / 6] if isinstance(scheduler, lr.CosineAnnealingWarmRestarts) else []))


def each_batch_before(engine, scheduler):
    for x, y in engine.dataloader:
        engine.backward(engine.criterion(engine(x), y))
        scheduler.step()
        engine.step()


def each_update(engine, scheduler):
    for x, y in engine.dataloader:
        if step_on(engine, x, y) is not None:
            engine.lr_scheduler.step()


def each_epoch(engine, scheduler):
    for _ in range(2):
        for x, y in engine.dataloader:
            step_on(engine, x, y)
        scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("mode", "accumulation"), [("none", 4), ("torch_fp16", 1), ("torch_fp16", 4)])
@pytest.mark.parametrize(
    ("interval", "make", "loop"),
    [
        ("step", halving, each_batch),
        ("step", halving, each_batch_before),
        ("step", halving, each_update),
        ("step", halving, each_epoch),
        ("step", chained, each_batch),
        ("step", warmed_up, each_batch),
        ("step", restarting, each_batch),
        ("epoch", halving, each_batch),
        ("epoch", halving, each_epoch),
        ("epoch", lambda optimizer: lr.ChainedScheduler([chained(optimizer)]), each_epoch),
    ],
)
def test_a_scheduler_stepped_by_hand_as_well(mode, interval, make, loop, accumulation):
    config = MODES[mode] | {"lr_interval": interval, "gradient_accumulation": accumulation}
    engine = make_engine(config, loader=make_loader(24, 4), lr_scheduler=make)
    with pytest.raises(InputError, match=r"was called outside the engine, .* lr_interval='manual'"):
        loop(engine, engine.lr_scheduler)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("make", [halving, chained, warmed_up])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("interval", ["step", "epoch", "manual"])
def test_a_scheduler_loaded_or_moved_on_by_hand(interval, copied, make):
    """As a loop resumes from files of its own, or goes back to an earlier state after a bad step."""
    engine = make_engine({"lr_interval": interval}, loader=make_loader(24, 4), lr_scheduler=make)
    scheduler = engine.lr_scheduler
    scheduler.step()
    train(engine)
    state = scheduler.state_dict()
    state = copy.deepcopy(state) if copied else state
    train(engine)
    train(engine)
    scheduler.load_state_dict(state)
    train(engine)
    scheduler = scheduler._schedulers[0] if make is chained else scheduler
    assert scheduler.last_epoch == 1 + {"step": 12, "epoch": 2, "manual": 0}[interval]
    if interval == "manual":
        each_batch(engine, scheduler)
        assert scheduler.last_epoch == 7
