"""Clipping on the engine, and who advances the learning rate."""

from __future__ import annotations

import gc
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
    train,
)


@pytest.mark.parametrize("mode", ["none", "torch_fp16", "naive_fp16"])
def test_clip_grad_norm_on_the_engine(mode):
    engine = make_engine(MODES[mode] | {"gradient_accumulation": 2}, loader=make_loader(24, 4))
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


def test_clip_grad_norm_before_backward():
    with pytest.raises(InputError, match=r"clip_grad_norm_ was called before engine.backward"):
        make_engine().clip_grad_norm_(1.0)


@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
def test_lr_of_every_update_skips_not_counted(mode):
    engine = make_engine(MODES[mode], lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    x, y = make_data(8)
    rates = []
    for i in range(6):
        loss = engine.criterion(engine(x), y)
        engine.zero_grad()
        engine.backward(loss * math.inf if i in (0, 3) and mode != "none" else loss)
        rates.append(engine.step().lr)
    if mode == "none":
        expected = [0.05 * 0.5**i for i in range(6)]
    else:
        expected = [0.05 * 0.5**taken for taken in (0, 0, 1, 2, 2, 3)]
    assert rates == pytest.approx(expected)
    engine.state_dict()  # settles the last one
    assert engine.lr_scheduler.get_last_lr()[0] == pytest.approx(0.05 * 0.5 ** (6 if mode == "none" else 4))


def test_without_skips_the_scheduler_advances_at_once():
    engine = make_engine(lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert engine.optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize(("interval", "advanced"), [("step", 12), ("epoch", 2), ("manual", 0)])
def test_lr_interval(interval, advanced):
    engine = make_engine(
        FP16_TORCH | {"lr_interval": interval}, lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1, gamma=0.5)
    )
    train(engine, epochs=2)
    assert engine.lr_scheduler.last_epoch == advanced


def by_next(loader):
    batches = iter(loader)
    return (next(batches) for _ in range(len(loader)))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    "counted",
    [
        by_next,
        lambda loader: itertools.islice(loader, len(loader)),
        lambda loader: (batch for _, batch in zip(range(len(loader)), loader, strict=False)),
    ],
    ids=["next", "islice", "zip"],
)
def test_an_epoch_ends_for_a_loop_that_counts_its_batches(counted, accumulation):
    """It never asks for the batch that is not there. Epochs that were left early, or only looked at, do not end."""
    engine = make_engine(
        {"lr_interval": "epoch", "gradient_accumulation": accumulation},
        lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    )

    def train(batches, until=math.inf):
        for number, (x, y) in enumerate(batches):
            if number == until:
                return
            engine.backward(engine.criterion(engine(x), y))
            engine.step()

    for epoch in range(1, 3):
        train(counted(engine.dataloader))
        gc.collect()
        assert engine.lr_scheduler.last_epoch == epoch
        assert engine.dataloader.state_dict()["finished"]
    train(engine.dataloader, until=len(engine.dataloader) - 1)  # the last one is handed out, and not trained on
    assert engine.lr_scheduler.last_epoch == 2
    with torch.no_grad():
        assert len(list(counted(engine.dataloader))) == len(engine.dataloader)
    assert engine.lr_scheduler.last_epoch == 2


def test_a_scheduler_given_as_an_object_keeps_working_on_masters():
    model = MLP()
    optimizer = adamw(model.parameters())
    scheduler = halfmesh.LinearWarmupLR(optimizer, warmup_steps=2, total_steps=10)
    loader = make_loader()
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), loader, FP16_NAIVE, lr_scheduler=scheduler)
    rates = [r.lr for r in train(engine)]
    assert len(set(rates)) == 6
    assert engine.lr_scheduler is scheduler
