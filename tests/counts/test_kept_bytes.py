"""What is kept in memory, and until when."""

from __future__ import annotations

import weakref

import torch

import halfmesh
from tests.support.models import linear_engine, make_engine


def test_memory_of_gradients_is_kept_until_the_next_step():
    """As in a loop by hand: given back between two steps, it would go to the system and come back page by page."""
    engine = make_engine()
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x), y))
    grads = [weakref.ref(param.grad) for param in engine.model.parameters()]
    engine.step()
    assert all(param.grad is None for param in engine.model.parameters())
    assert all(grad() is not None for grad in grads)
    engine.zero_grad()
    assert all(grad() is None for grad in grads)


def test_an_output_is_gone_when_the_next_one_is_made():
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def compute(engine, batch):
        alive.append([output() is not None for output in outputs[-1:]])
        outcome = halfmesh.compute_batch(engine, batch)
        outputs.append(weakref.ref(outcome.output))
        return outcome

    engine = linear_engine({"bf16": {"mode": "torch"}}, samples=12, evaluated=0)
    halfmesh.Trainer(engine, compute=compute).fit(epochs=1)
    assert alive == [[], [False], [False]]
