"""The bytes that are announced before a run are those that are there in it."""

from __future__ import annotations

import pytest
import torch
from torch import optim

from halfmesh.engine.summary import parse_bytes, state_bytes
from halfmesh.errors import InputError
from tests.support.models import BF16_NAIVE, FP16_TORCH, MLP, make_engine, train

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": optim.Adam,
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adagrad": optim.Adagrad,
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "adadelta": optim.Adadelta,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
}


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


def test_reduced_gradients_are_held_in_the_reductions_dtype():
    engine = make_engine(BF16_NAIVE)
    numel = sum(p.numel() for p in engine.model.parameters())
    assert state_bytes(engine.model, engine._update, torch.float32).gradients == 4 * numel
    assert state_bytes(engine.model, engine._update, torch.bfloat16).gradients == 2 * numel


def test_an_optimizer_that_nobody_knows():
    class Mine(optim.SGD):
        pass

    engine = make_engine(optimizer=lambda p: Mine(p, lr=0.1))
    assert state_bytes(engine.model, engine._update).optimizer is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("80 GiB", 80 * 2**30), ("80e9", 80 * 10**9), ("1.5tib", 1.5 * 2**40), ("512B", 512)],
)
def test_amounts_of_memory(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80GBB", "-3GB"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(InputError, match="is not an amount of memory; write 80GB"):
        parse_bytes(text)
