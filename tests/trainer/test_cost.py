"""What the Trainer adds to a step of the loop, counted. Seconds: benchmarks/trainer_overhead.py."""

from __future__ import annotations

import cProfile
import pstats
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from tests.support.models import FEATURES, make_data
from tests.support.updates import CountReads


def make(batches, **config):
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*make_data(4 * batches)), 4)
    return halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, loader, config, device="cpu")


def loop(engine):
    """With the sum that a user prints."""
    total = torch.zeros(())
    for x, y in engine.dataloader:
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        total += loss.detach()


def fit(engine):
    halfmesh.Trainer(engine, log_every=1000).fit(epochs=engine.dataloader.next_epoch + 1)


def per_step(run, measure, **config):
    """Of 40 more batches."""
    found = []
    for batches in (10, 50):
        engine = make(batches, **config)
        run(engine)
        found.append(measure(lambda engine=engine: run(engine)))
    return (found[1] - found[0]) / 40


def calls(run):
    profile = cProfile.Profile()
    profile.enable()
    run()
    profile.disable()
    return pstats.Stats(profile).total_calls


def operations(run):
    with CountReads() as counter:
        run()
    return len(counter.ops)


def reads(run):
    with CountReads() as counter:
        run()
    return counter.reads


def test_calls_of_python():
    added = per_step(fit, calls) - per_step(loop, calls)
    assert added <= 22, f"{added:.1f} calls more a step"


@pytest.mark.parametrize("config", [{}, {"bf16": {"mode": "torch"}}], ids=["fp32", "bf16"])
def test_operations_of_torch(config):
    assert per_step(fit, operations, **config) <= per_step(loop, operations, **config)
    assert per_step(fit, reads, **config) == per_step(loop, reads, **config)


def test_an_output_is_gone_when_the_next_one_is_made():
    outputs, alive = [], []

    def compute(engine, batch):
        alive.append([output() is not None for output in outputs[-1:]])
        outcome = halfmesh.compute_batch(engine, batch)
        outputs.append(weakref.ref(outcome.output))
        return outcome

    engine = make(3)
    halfmesh.Trainer(engine, compute=compute).fit(epochs=1)
    assert alive == [[], [False], [False]]
