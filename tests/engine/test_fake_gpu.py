"""What only a GPU would show, without one: where a step waits for the device, or could not be captured in a graph."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.amp.host_copy import HostCopy
from halfmesh.engine.transfer import Transfer
from tests.support.fake_gpu import fake_gpu, give_gradients
from tests.support.models import MLP, MODES, adamw, sgd

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch for CUDA")

LOSSES = {
    f"two_losses_{level}": {"fp16": {"mode": "apex", "opt_level": level, "num_losses": 2}} for level in ("O1", "O2")
}
WEIGHTED = {"weighted": {"loss_reduction": "weighted", "fp16": {"mode": "torch"}}}
NAIVE_VERBOSE = {"naive_verbose": {"fp16": {"mode": "naive", "verbose": True}}}
CONFIGS = MODES | LOSSES | WEIGHTED | NAIVE_VERBOSE


def steps(gpu, config, optimizer, capturing, losses=1, weight=3):
    """Of 5 steps the last two are watched, and captured where that is asked for."""
    with torch.device("cuda", 0):
        model = MLP()
        x, y = torch.empty(8, 8), torch.zeros(8, dtype=torch.int64)
    weighted = config.get("loss_reduction") == "weighted"

    def criterion(output, target):
        loss = nn.functional.cross_entropy(output, target)
        return (loss, weight) if weighted else loss

    config = config | {"clip_grad_norm": 0.5}
    engine = halfmesh.initialize(model, optimizer, criterion, None, config, device="cuda")

    def step():
        engine.zero_grad()
        output = engine(x)
        for loss_id in range(losses):
            engine.backward(engine.criterion(output, y), loss_id, retain_graph=True)
        engine.step()

    with give_gradients(engine.model.parameters):
        for _ in range(3):
            step()
        gpu.products.clear()
        with gpu.watch(capturing):
            step()
            step()
    return engine


@pytest.mark.parametrize("capturing", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_waits(name, optimizer, capturing):
    with fake_gpu() as gpu:
        losses = 2 if name in LOSSES else 1
        engine = steps(gpu, CONFIGS[name], lambda p: optimizer(p), capturing, losses)
        assert engine._update.holdings.folds
    assert gpu.found == []


def test_it_sees_who_reads():
    with fake_gpu() as gpu:
        engine = steps(gpu, MODES["torch_fp16"], lambda p: adamw(p), False)
        with gpu.watch(False):
            bool(engine._update.losses.first.scale > 1)
            torch.tensor([1.0]).to("cuda")
            engine.skipped_steps  # noqa: B018
    assert len(gpu.found) == 3


def test_an_optimizer_that_cannot_take_the_verdict_reads_it_once():
    with fake_gpu() as gpu:
        steps(gpu, MODES["torch_fp16"], lambda p: torch.optim.RMSprop(p, lr=0.1), False)
    assert len(gpu.found) == 2  # of two steps
    assert all("stepper.py" in found for found in gpu.found)


def test_step_counters_are_where_they_are_read():
    """On the device for fused kernels; on the host for the plain ones of a user who gets the optimizer back."""
    with fake_gpu() as gpu:
        engine = steps(gpu, {}, lambda p: adamw(p), False)
        optimizer = engine.optimizer
        optimizer.state = {p: {"step": torch.ones((), device="cuda")} for p in engine.model.parameters()}
        engine.close()
        assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}


def test_a_factor_is_not_rounded_to_half_precision():
    """As CUDA's kernels do with a factor without dimensions, when the tensor has half precision."""
    config = {"fp16": {"mode": "apex", "opt_level": "O3", "loss_scale": 128.0}}
    with fake_gpu() as gpu:
        steps(gpu, config, lambda p: sgd(p), False)
    halves = [dims for dtype, dims in gpu.products if dtype == torch.float16]
    assert set(halves) == {1}


def test_a_copy_is_awaited_on_its_own_device(monkeypatch):
    """Which need not be the current one."""
    recorded, streams = [], []
    with fake_gpu():
        monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: streams.append(device) or f"of {device}")
        monkeypatch.setattr(torch.cuda.Event, "record", lambda _, stream=None: recorded.append(stream))
        HostCopy([torch.ones((), device="cuda:1")])
    assert recorded == ["of cuda:1"]


@pytest.mark.parametrize("pinned", [False, True])
def test_only_memory_that_came_page_locked_is_waited_for(pinned, monkeypatch):
    """What this made page-locked itself nobody writes over."""
    waits = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with fake_gpu():
        transfer = Transfer(torch.device("cuda", 0))
        transfer.start([torch.ones(2)])
        transfer.wait()
        transfer.wait()
    assert waits == [1] * pinned
