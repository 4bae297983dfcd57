"""What the Trainer adds to a step of the loop, counted."""

from __future__ import annotations

import cProfile
import gc
import pstats
import weakref

import torch

import halfmesh
from tests.support.models import linear_engine
from tests.support.updates import CountReads


def make(batches):
    return linear_engine({"bf16": {"mode": "torch"}}, samples=4 * batches, evaluated=0)


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


def calls(run, engine):
    profile = cProfile.Profile()
    gc.collect()
    gc.disable()  # finalizers of earlier tests are no calls of this step
    profile.enable()
    run(engine)
    profile.disable()
    gc.enable()
    return pstats.Stats(profile).total_calls


def operations_and_reads(run, engine):
    with CountReads() as counter:
        run(engine)
    return len(counter.ops) + 1j * counter.reads


def per_step(run, measure):
    """Of 40 more batches."""
    found = []
    for batches in (10, 50):
        engine = make(batches)
        run(engine)
        found.append(measure(run, engine))
    return (found[1] - found[0]) / 40


def test_calls_of_python():
    added = per_step(fit, calls) - per_step(loop, calls)
    assert added <= 22, f"{added:.1f} calls more a step"


def test_operations_of_torch_and_reads_by_the_host():
    ours, theirs = per_step(fit, operations_and_reads), per_step(loop, operations_and_reads)
    assert ours.real <= theirs.real
    assert ours.imag == theirs.imag


def test_an_output_is_gone_when_the_next_one_is_made():
    outputs, alive = [], []

    def compute(engine, batch):
        alive.append([output() is not None for output in outputs[-1:]])
        outcome = halfmesh.compute_batch(engine, batch)
        outputs.append(weakref.ref(outcome.output))
        return outcome

    halfmesh.Trainer(make(3), compute=compute).fit(epochs=1)
    assert alive == [[], [False], [False]]
