"""What only a GPU shows of one process: no wait in a step, fused kernels, cuDNN, pinned memory, its random numbers.

Skipped without CUDA; tests/simulated_gpu runs them, and says what that shows.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfmesh
from halfmesh.amp.float8 import Float8Product
from halfmesh.parallel.rng import RandomFork
from halfmesh.utils.torch_private import foreach_mul_
from tests.support import checkpoint_runs
from tests.support.models import MLP, MODES, adamw, difference, full_weights, make_loader, reference, sgd, train

FLOAT8 = [pytest.mark.not_simulated("float8"), pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")]
ALL_MODES = MODES | {f"fp8_{name}": {"fp8": {"mode": "torch", "recipe": name}} for name in ("tensorwise", "rowwise")}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_gpu_engine(config, optimizer=sgd, model=None, loader=None, **options):
    model, loader = model or MLP(), loader or make_loader(80)
    options = {"device": "cuda"} | options
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), loader, config, **options)


@contextmanager
def no_waits():
    """A scope in which waiting for the device is an error, also for an event, which torch's own check leaves out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.Event, "synchronize", lambda event: event.query() or pytest.fail("waits"))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


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
    x, weight = (torch.randn(size, 64, device="cuda").bfloat16().requires_grad_() for size in (rows, 128))
    results = []
    for emulate in ("auto", True):
        output = Float8Product(scaling, emulate)(x, weight)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), [x, weight])])
    for mine, other in zip(*results, strict=True):
        assert (mine.double() - other.double()).norm() <= 0.02 * other.double().norm()


@pytest.mark.parametrize("mode", [pytest.param(m, marks=() if m in MODES else FLOAT8) for m in ALL_MODES])
def test_a_loop_with_a_scheduler_and_accumulation_never_waits(mode):
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


def test_existing_state_moves_with_the_model():
    """An optimizer that has stepped on the CPU: its state and step counters go to the GPU, and fused takes over."""
    model, other = MLP(), MLP()
    optimizer, plain = adamw(model.parameters()), adamw(other.parameters())
    for each, its_optimizer in ((model, optimizer), (other, plain)):
        each(torch.ones(1, 8)).sum().backward()
        its_optimizer.step()
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


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x.view(-1, 4, 2))[0][:, -1, :4]


def convolutions():
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
    layers = nn.Conv2d(2, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.Conv2d(32, 32, 3, padding=1), *head
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *layers).to(memory_format=torch.channels_last)


def trained(build, config):
    """The model, and the loss of all batches after an epoch."""
    torch.manual_seed(0)
    engine = make_gpu_engine(config, model=build())
    assert not train(engine)[-1].skipped
    with torch.no_grad():
        losses = [engine.eval().criterion(engine(x), y).item() for x, y in engine.dataloader]
    return engine.model, sum(losses) / len(losses)


@pytest.mark.parametrize("keep", [True, False, None])
def test_convolutions_stay_in_channels_last(keep):
    """And cuDNN takes fp16 inputs with O2's fp32 BatchNorm weights, and with fp16 ones, as NAIVE's are."""
    config = MODES["naive_fp16" if keep is None else "apex_o2"]
    config = {"fp16": config["fp16"] | ({} if keep is None else {"keep_batchnorm_fp32": keep})}
    model, loss = trained(convolutions, config)
    assert model[2].weight.dtype == (torch.float32 if keep else torch.float16)
    convs = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in convs)
    assert loss == pytest.approx(trained(convolutions, {})[1], rel=0.05)


def test_an_lstm_finds_its_weights_in_one_piece_of_memory():
    build = partial(Recurrent, 2, 32, 2, batch_first=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contiguous chunk")
        _, loss = trained(build, MODES["naive_fp16"])
    assert loss == pytest.approx(trained(build, {})[1], rel=0.05)


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
    engine, other, again = (make_saved_engine("naive_bf16", device) for device in ("cuda", "cpu", "cuda"))
    checkpoint_runs.train(engine, 6, 6, tmp_path / "gpu")
    other.load(tmp_path / "gpu")
    other.save(tmp_path / "cpu")
    again.load(tmp_path / "cpu")
    torch.testing.assert_close(again.model.state_dict(), engine.model.state_dict(), rtol=0, atol=0)
    assert checkpoint_runs.train(again, 2)


def draws(rank):
    """Outside, inside and after a fork of rank `rank`, which does not wait for the device: its state is a seed and a
    counter, which the host knows."""
    torch.cuda.manual_seed(7)
    fork = RandomFork(rank, torch.device("cuda", torch.cuda.current_device()))
    found = [torch.rand(1000, device="cuda")]
    with no_waits():
        for _ in range(2):
            fork.open()
            found.append(torch.rand(1000, device="cuda"))
            fork.close()
            found.append(torch.rand(1000, device="cuda"))
    return found


def test_random_numbers_of_ranks_agree_outside_a_fork_and_differ_inside():
    first, second = draws(0), draws(1)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, True, False, True]
    values = torch.stack([*first, second[1], second[3]])
    assert len(values.unique(dim=0)) == 7, "no sequence comes twice"
