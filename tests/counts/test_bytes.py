"""The bytes that are announced before a run are those that are there in it; what is kept in memory, and until when."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import optim

import halfmesh
from halfmesh.engine.summary import parse_bytes, state_bytes
from halfmesh.errors import InputError
from tests.support.models import BF16_NAIVE, FP16_TORCH, MLP, linear_engine, make_engine, train
from tests.support.updates import OPTIMIZERS

CASES = [(name, {}) for name in OPTIMIZERS] + [("adam", FP16_TORCH), ("adam", BF16_NAIVE)]


@pytest.mark.parametrize(("name", "config"), CASES, ids=str)
def test_bytes_are_counted_right(name, config):
    model = MLP()
    model.register_buffer("table", torch.zeros(100))
    engine = make_engine(config, model=model, optimizer=OPTIMIZERS[name])
    update = engine._update
    expected = state_bytes(model, update)
    train(engine, max_batches=2)
    state = [v for s in engine.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    assert expected.parameters == sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    assert expected.masters == sum(m.numel() * 4 for m in update.master_weights.masters.values())
    assert expected.optimizer == sum(t.numel() * t.element_size() for t in state)
    numel = sum(p.numel() for p in model.parameters())
    assert expected.gradients == numel * (2 + 4 if config is BF16_NAIVE else 4)  # a small model is one part of a stream
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)) if config is BF16_NAIVE else ():
        assert state_bytes(model, update, dtype).gradients == size * numel, "reduced ones, in the reduction's dtype"


def test_an_optimizer_that_nobody_knows():
    class Mine(optim.SGD):
        pass

    engine = make_engine(optimizer=lambda p: Mine(p, lr=0.1))
    assert state_bytes(engine.model, engine._update).optimizer is None


def test_amounts_of_memory():
    sizes = {"80GB": 80 * 10**9, "80 GiB": 80 * 2**30, "80e9": 80 * 10**9, "1.5tib": 1.5 * 2**40, "512B": 512}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("80GBB", "-3GB"):
        with pytest.raises(InputError, match="is not an amount of memory; write 80GB"):
            parse_bytes(text)


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
    outputs, alive = [], []

    def compute(engine, batch):
        alive.append([output() is not None for output in outputs[-1:]])
        outcome = halfmesh.compute_batch(engine, batch)
        outputs.append(weakref.ref(outcome.output))
        return outcome

    engine = linear_engine({"bf16": {"mode": "torch"}}, samples=12, evaluated=0)
    halfmesh.Trainer(engine, compute=compute).fit(epochs=1)
    assert alive == [[], [False], [False]]
