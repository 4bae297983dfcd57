"""Clipping on the engine, and who advances the learning rate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn, optim

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

X, Y = make_data(8)


def halving(optimizer):
    return optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


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
            with pytest.raises(InputError, match="on microbatch 1 of 2, where gradients are incomplete"):
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


def test_a_scheduler_given_as_an_object_keeps_working_on_masters():
    model = MLP()
    optimizer = adamw(model.parameters())
    scheduler = halfmesh.LinearWarmupLR(optimizer, warmup_steps=2, total_steps=10)
    engine = make_engine(FP16_NAIVE, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    assert len({r.lr for r in train(engine)}) == 6
    assert engine.lr_scheduler is scheduler


def test_a_scheduler_stepped_by_hand_as_well():
    engine = make_engine(lr_scheduler=halving)
    step_on(engine, X, Y)
    engine.lr_scheduler.step()
    with pytest.raises(InputError, match=r"was called outside the engine, .* lr_interval='manual'"):
        step_on(engine, X, Y)
