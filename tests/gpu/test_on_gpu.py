"""What only a GPU shows of one process: no wait in a step, fused kernels, cuDNN, pinned memory, its random numbers.

These tests are skipped without CUDA, and none has run on a GPU yet; on simulated GPUs they run. That shows devices that
mix, reads by the host, and where tensors are. It cannot show the order of streams (work is done when it is asked for),
what CUDA's kernels round, what NCCL does, or how much memory is taken: only a GPU does.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfmesh
from halfmesh.parallel.rng import RandomFork
from halfmesh.utils.torch_private import foreach_mul_
from tests.gpu.day_fit import float8_product
from tests.support import checkpoint_runs
from tests.support.models import MLP, MODES, adamw, difference, full_weights, make_loader, reference, sgd, train

FLOAT8 = [
    pytest.mark.not_simulated("float8"),
    pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao"),
]
ALL_MODES = MODES | {f"fp8_{name}": {"fp8": {"mode": "torch", "recipe": name}} for name in ("tensorwise", "rowwise")}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_gpu_engine(config, optimizer=sgd, model=None, loader=None, **options):
    model, loader = model or MLP(), loader or make_loader(80)
    options = {"device": "cuda"} | options
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), loader, config, **options)


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


@pytest.mark.parametrize("rows", [1, 7, 24, 32])
@pytest.mark.parametrize("scaling", [pytest.param(name, marks=FLOAT8) for name in ("tensorwise", "rowwise")])
def test_products_in_float8_are_those_that_are_emulated(scaling, rows):
    """Forward and backward, with rows that 16 divides or not."""
    assert float8_product(torch.device("cuda"), scaling, rows)


@pytest.mark.parametrize("mode", [pytest.param(m, marks=() if m in MODES else FLOAT8) for m in ALL_MODES])
def test_a_loop_with_a_scheduler_and_accumulation_never_waits(mode, no_waits):
    """With gradients of more than 65,536 elements, and in NAIVE and O2 of more than one bucket."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    model = nn.Sequential(nn.Linear(8, 2048), *layers, nn.Linear(2048, 4))
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.9**update)
    config = ALL_MODES[mode] | {"clip_grad_norm": 1.0, "gradient_accumulation": 2}
    engine = make_gpu_engine(config, optimizer, model, make_loader(64), lr_scheduler=scheduler)
    batches = list(engine.dataloader)  # fewer than 10: the tenth step looks for writes that are lost
    for number, (x, y) in enumerate(batches):
        with no_waits() if number > 3 else nullcontext():
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
    assert engine.global_step == len(batches) // 2
    assert all(value.isfinite().all() for value in full_weights(engine).values())


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


def test_existing_state_moves_with_the_model():
    """An optimizer that has stepped on the CPU: its state and step counters go to the GPU, and fused takes over."""
    model, other = MLP(), MLP()
    for each in (model, other):
        each(torch.ones(1, 8)).sum().backward()
    optimizer, plain = adamw(model.parameters()), adamw(other.parameters())
    optimizer.step()
    plain.step()
    engine = make_gpu_engine({}, optimizer, model, make_loader(8))
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
        engine = make_gpu_engine({"fp16": {"mode": "apex", "opt_level": "O1", "loss_scale": 128.0}}, model=model)
        x, y = next(iter(engine.dataloader))
        engine.backward(engine.criterion(engine(x), y))
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@pytest.mark.parametrize("keep", [True, False])
def test_o2_with_batchnorm(keep):
    """cuDNN takes fp16 inputs with fp32 BatchNorm weights, and with fp16 ones."""
    model = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Flatten())
    config = {"fp16": {"mode": "apex", "opt_level": "O2", "keep_batchnorm_fp32": keep}}
    results = train(make_gpu_engine(config, model=model))
    assert model[2].weight.dtype == (torch.float32 if keep else torch.float16)
    assert not results[-1].skipped
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_batches_come_from_pinned_memory_and_are_whole():
    """The copy of the next batch runs beside the work on this one. (Without workers the host waits for the last copy,
    of which the dataset may write the memory again, and not for the work.)"""
    batches = [torch.full((1 << 20,), float(number)) for number in range(8)]
    engine = make_gpu_engine({}, loader=torch.utils.data.DataLoader(batches, batch_size=None))
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


def make_saved_engine(mode, device="cuda"):
    """With dropout, whose random numbers on the GPU are to go on, too."""
    config = {**MODES[mode], "gradient_accumulation": 2}
    return make_gpu_engine(config, adamw, MLP(dropout=0.3), make_loader(48, 4, shuffle=True), device=device)


@pytest.mark.parametrize(("mode", "in_background"), [("torch_fp16", False), ("naive_bf16", True), ("apex_o2", True)])
def test_a_resumed_run_goes_on_bit_by_bit(mode, in_background, tmp_path):
    engine, other = make_saved_engine(mode), make_saved_engine(mode)
    engine.save = partial(engine.save, in_background=in_background)
    expected = checkpoint_runs.train(engine, 16, 6, tmp_path)[6:]
    engine.wait_for_save()
    checkpoint_runs.train(other, 2)
    other.load(tmp_path)
    assert checkpoint_runs.train(other, 10) == expected


def test_checkpoints_go_from_a_gpu_to_the_cpu_and_back(tmp_path):
    engine = make_saved_engine("naive_bf16")
    checkpoint_runs.train(engine, 6, 6, tmp_path / "gpu")
    other = make_saved_engine("naive_bf16", "cpu")
    other.load(tmp_path / "gpu")
    other.save(tmp_path / "cpu")
    again = make_saved_engine("naive_bf16")
    again.load(tmp_path / "cpu")
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, engine.model.state_dict()[name]), name
    assert checkpoint_runs.train(again, 2)


def draws(rank: int) -> list[torch.Tensor]:
    """Outside, inside and after a fork of rank `rank`, which does not wait for the device: its state is a seed and a
    counter, which the host knows."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.manual_seed(7)
    fork = RandomFork(rank, device)
    found = [torch.rand(1000, device=device)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            fork.open()
            found.append(torch.rand(1000, device=device))
            fork.close()
            found.append(torch.rand(1000, device=device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return found


def test_random_numbers_of_ranks_agree_outside_a_fork_and_differ_inside():
    first, second = draws(0), draws(1)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, True, False, True]
    values = torch.stack([*first, second[1], second[3]])
    assert len(values.unique(dim=0)) == 7, "no sequence comes twice"
