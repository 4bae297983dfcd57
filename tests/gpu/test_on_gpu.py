"""What only a GPU shows: no synchronisation in a step, fused kernels, parity in every mode. Skipped without CUDA."""

from __future__ import annotations

import math

import pytest
import torch
from models import MLP, MODES, TOLERANCES, adamw, difference, full_weights, make_loader, reference, sgd, train
from torch import nn

import halfmesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_gpu_engine(config, optimizer=sgd, **options):
    return halfmesh.initialize(
        MLP(), optimizer, nn.CrossEntropyLoss(), make_loader(80), config, device="cuda", **options
    )


@pytest.mark.parametrize("mode", MODES)
def test_parity(mode):
    growing = {"growth_interval": 3} if "fp16" in mode else {}
    config = {key: {**value, **growing} for key, value in MODES[mode].items()} | {"clip_grad_norm": 0.7}
    engine = make_gpu_engine(config)
    train(engine)
    weights = {name: value.cpu() for name, value in full_weights(engine).items()}
    assert difference(weights, reference(make_loader(80), max_norm=0.7)) < TOLERANCES[mode]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_never_waits_for_the_device(mode, optimizer):
    engine = make_gpu_engine(MODES[mode] | {"clip_grad_norm": 1.0}, lambda p: optimizer(p))
    x, y = next(iter(engine.dataloader))
    for step in range(4):
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            engine.backward(loss)
            result = engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert result.grad_norm is not None
    assert math.isfinite(result.grad_norm)


@pytest.mark.parametrize("mode", ["torch_fp16", "naive_fp16"])
def test_overflow_on_the_first_step(mode):
    engine = make_gpu_engine(MODES[mode])
    before = full_weights(engine)
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x), y) * math.inf)
    assert engine.step().skipped
    torch.testing.assert_close(full_weights(engine), before, rtol=0, atol=0)


def test_existing_state_moves_with_the_model():
    """An optimizer that has stepped on the CPU: its state and step counters go to the GPU, and fused takes over."""
    model, other = MLP(), MLP()
    for each in (model, other):
        each(torch.ones(1, 8)).sum().backward()
    optimizer, plain = adamw(model.parameters()), adamw(other.parameters())
    optimizer.step()
    plain.step()
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), make_loader(8), device="cuda")
    train(engine)
    reference(make_loader(8), lambda _: plain, model=other)
    weights = {name: value.cpu() for name, value in full_weights(engine).items()}
    assert difference(weights, other) < 1e-5
