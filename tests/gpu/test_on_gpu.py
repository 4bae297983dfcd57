"""What only a GPU shows: no synchronisation in a step, fused kernels, parity in every mode. Skipped without CUDA."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfmesh
from halfmesh.utils.torch_private import foreach_mul_
from tests.support.models import (
    MLP,
    MODES,
    TOLERANCES,
    adamw,
    difference,
    full_weights,
    make_loader,
    reference,
    sgd,
    train,
)

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


@pytest.fixture
def no_waits(monkeypatch):
    """A scope in which waiting for the device is an error, also for an event, which torch's own check leaves out."""

    @contextmanager
    def scope():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Event, "synchronize", lambda event: event.query() or pytest.fail("waits"))
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    return scope


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_with_half_precision_rounds_once(dtype):
    for shape in ((), (5,), (3, 4)):
        tensor = torch.full(shape, 3e4, dtype=dtype, device="cuda")
        expected = (tensor.float() / 3).to(dtype)
        foreach_mul_([tensor], torch.tensor(1 / 3, device="cuda"))
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_never_waits_for_the_device(mode, optimizer, no_waits):
    engine = make_gpu_engine(MODES[mode] | {"clip_grad_norm": 1.0}, lambda p: optimizer(p))
    x, y = next(iter(engine.dataloader))
    for step in range(4):
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        with no_waits() if step > 1 else nullcontext():
            engine.backward(loss)
            result = engine.step()
    assert result.grad_norm is not None
    assert math.isfinite(result.grad_norm)


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_with_a_scheduler_and_accumulation_never_waits(mode, no_waits):
    """With gradients of more than 65,536 elements, and in NAIVE and O2 of more than one bucket."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    model = nn.Sequential(nn.Linear(8, 2048), *layers, nn.Linear(2048, 4))
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.9**update)
    config = MODES[mode] | {"clip_grad_norm": 1.0, "gradient_accumulation": 2}
    loss = nn.CrossEntropyLoss()
    engine = halfmesh.initialize(model, optimizer, loss, make_loader(80), config, lr_scheduler=scheduler, device="cuda")
    batches = list(engine.dataloader)
    for number, (x, y) in enumerate(batches):
        with no_waits() if number > 3 else nullcontext():
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
    assert engine.global_step == len(batches) // 2
    assert all(value.isfinite().all() for value in full_weights(engine).values())


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
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), make_loader(8), {}, device="cuda")
    train(engine)
    reference(make_loader(8), lambda _: plain, model=other)
    weights = {name: value.cpu() for name, value in full_weights(engine).items()}
    assert difference(weights, other) < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_o1_casts_again_in_the_threads_of_backward(reentrant):
    """On a GPU backward runs in threads of its own, where activation checkpointing computes the forward again."""

    class Saving(MLP):
        saves = False

        def forward(self, x):
            x = self.first(x)
            return checkpoint(self.rest, x, use_reentrant=reentrant) if self.saves else self.rest(x)

        def rest(self, x):
            return self.last(nn.functional.softmax(self.again(self.norm(x)), -1))

    grads = []
    for saves in (False, True):
        model = Saving()
        model.saves = saves
        config = {"fp16": {"mode": "apex", "opt_level": "O1", "loss_scale": 128.0}}
        engine = halfmesh.initialize(model, sgd, nn.CrossEntropyLoss(), make_loader(8), config, device="cuda")
        x, y = next(iter(engine.dataloader))
        engine.backward(engine.criterion(engine(x), y))
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_several_losses_do_not_wait_for_the_device(no_waits):
    engine = make_gpu_engine({"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2}})
    x, y = next(iter(engine.dataloader))
    for step in range(4):
        output = engine(x)
        losses = engine.criterion(output, y), output.square().mean() * (math.inf if step == 2 else 1.0)
        with no_waits() if step > 1 else nullcontext():
            engine.backward(losses[0], loss_id=0, retain_graph=True)
            engine.backward(losses[1], loss_id=1)
            engine.step()
    assert engine.skipped_steps == 1
    assert engine.loss_scales == (2.0**16, 2.0**15)


@pytest.mark.parametrize("keep", [True, False])
def test_o2_and_o3_with_batchnorm(keep):
    """cuDNN takes fp16 inputs with fp32 BatchNorm weights, and with fp16 ones."""
    for opt_level in ("O2", "O3"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Flatten())
        config = {"fp16": {"mode": "apex", "opt_level": opt_level, "keep_batchnorm_fp32": keep}}
        engine = halfmesh.initialize(model, sgd, nn.CrossEntropyLoss(), make_loader(80), config, device="cuda")
        results = train(engine)
        assert model[2].weight.dtype == (torch.float32 if keep else torch.float16)
        assert not results[-1].skipped
        assert all(value.isfinite().all() for value in model.state_dict().values())


def test_batches_come_from_pinned_memory_and_are_whole():
    """The copy of the next batch runs beside the work on this one. (Without workers the host waits for the last copy,
    of which the dataset may write the memory again, and not for the work.)"""
    batches = [torch.full((1 << 20,), float(number)) for number in range(8)]
    engine = halfmesh.initialize(
        MLP(),
        sgd,
        nn.CrossEntropyLoss(),
        torch.utils.data.DataLoader(batches, batch_size=None, num_workers=0),
        {},
        device="cuda",
    )
    sums = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in engine.dataloader:
            assert batch.is_cuda
            torch.cuda._sleep(10_000_000)
            sums.append(batch.sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [value.item() / (1 << 20) for value in sums] == [float(number) for number in range(8)]
