"""Loops of several shapes over one model, with automatic saves. They return loss and loss scale of each microbatch."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch

from tests.support.checkpoint_runs import make_engine
from tests.support.models import make_data

EPOCHS = 3
NOWHERE = lambda engine: None  # noqa: E731


def made(folder, *, seed=1, every=None, resume="auto", mode="none", **options):
    """48 samples in batches of 4, shuffled: 12 batches an epoch. All random numbers as at the start of a program."""
    saves = {"directory": str(folder), "every": every, "signals": ["SIGTERM"]}
    keys = {} if folder is None else {"checkpoint": saves, "resume": resume}
    for start in (random.seed, np.random.seed, torch.manual_seed):
        start(seed)
    return make_engine("one", mode, seed=seed, **{"dropout": 0.3, "shuffle": True, "batch": 4, **keys, **options})


def step(engine, x=None, y=None):
    """One microbatch."""
    if x is None:
        x, y = make_data(4)
    engine.zero_grad()
    loss = engine.criterion(engine(x), y)
    engine.backward(loss)
    engine.step()
    return loss.item(), engine.loss_scale


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in Path(folder).glob("step-*"))


def loop(engine, when=NOWHERE, lr=None, left_after=None):
    """Three epochs, with what a loop does after a step and after an epoch. The first two may be left with `break`: each
    is over, and the next one begins by the time it is saved."""
    seen = []
    for epoch in range(engine.dataloader.next_epoch, EPOCHS):
        for number, (x, y) in enumerate(engine.dataloader):
            seen.append(step(engine, x, y))
            when(engine)
            if epoch < 2 and number == left_after:
                break
        if lr == "epochs":
            engine.lr_scheduler.step()
    return seen


def twice(engine, when=NOWHERE):
    """Two steps with each batch: a forward is no boundary, or the batch would be taken for done."""
    seen = []
    for x, y in engine.dataloader:
        for _ in range(2):
            seen.append(step(engine, x, y))
            when(engine)
    return seen


def ahead(engine, when=NOWHERE):
    """Each batch is asked for between backward and step of the one before."""
    seen = []
    for _ in range(engine.dataloader.next_epoch, EPOCHS):
        batches = iter(engine.dataloader)
        batch = next(batches, None)
        while batch is not None:
            engine.zero_grad()
            loss = engine.criterion(engine(batch[0]), batch[1])
            engine.backward(loss)
            batch = next(batches, None)
            engine.step(last=batch is None)
            when(engine)
            seen.append((loss.item(), engine.loss_scale))
    return seen


def at(number, position=1, signum=signal.SIGTERM):
    """Send a signal after step `number`; in a cycle, after its microbatch `position`."""
    calls = []

    def send(engine):
        calls.append(engine.global_step)
        if calls[-1] == number and calls.count(number) == position:
            os.kill(os.getpid(), signum)

    return send
