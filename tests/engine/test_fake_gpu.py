"""What only a GPU would show, without one: where a step waits for the device, or could not be captured in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.amp.step_result import HostCopy
from tests.support.fake_gpu import fake_gpu, give_gradients
from tests.support.models import MLP, MODES, adamw, sgd

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch for CUDA")

CASES = {
    **{name: (MODES[name], adamw) for name in ("none", "torch_fp16", "torch_bf16", "naive_fp16")},
    "naive_verbose": ({"fp16": {"mode": "naive", "verbose": True}}, sgd),
    "two_losses_O1": ({"fp16": {"mode": "apex", "opt_level": "O1", "num_losses": 2}}, adamw),
    "two_losses_O2": ({"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2}}, adamw),
    "weighted": ({"loss_reduction": "weighted", "fp16": {"mode": "torch"}}, adamw),
}


def steps(gpu, config, optimizer, capturing=False):
    """Of 5 steps the last two are watched, and captured where that is asked for."""
    with torch.device("cuda", 0):
        model = MLP()
        x, y = torch.empty(8, 8), torch.zeros(8, dtype=torch.int64)
    weighted = config.get("loss_reduction") == "weighted"
    losses = config.get("fp16", {}).get("num_losses", 1)

    def criterion(output, target):
        loss = nn.functional.cross_entropy(output, target)
        return (loss, 3) if weighted else loss

    # A new function: what is kept of an optimizer must not be that of another test.
    engine = halfmesh.initialize(
        model, lambda p: optimizer(p), criterion, None, config | {"clip_grad_norm": 0.5}, device="cuda"
    )

    def step():
        engine.zero_grad()
        output = engine(x)
        for loss_id in range(losses):
            engine.backward(engine.criterion(output, y), loss_id, retain_graph=True)
        engine.step()

    with give_gradients(gpu, engine.model.parameters):
        for _ in range(3):
            step()
        with gpu.watch(capturing):
            step()
            step()
    return engine


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_within_a_capture(name):
    """Outside of one, tests that count launches look for waits, too."""
    with fake_gpu() as gpu:
        steps(gpu, *CASES[name], capturing=True)
    assert gpu.found == []


@pytest.mark.parametrize("name", ["naive_verbose", "weighted"])
def test_nothing_waits(name):
    with fake_gpu() as gpu:
        steps(gpu, *CASES[name])
    assert gpu.found == []


def test_what_waits_is_found():
    with fake_gpu() as gpu:
        engine = steps(gpu, MODES["torch_fp16"], adamw)
        with gpu.watch(False):
            torch.tensor([1.0]).to("cuda")
            engine.skipped_steps  # noqa: B018
    assert len(gpu.found) == 2


def test_an_optimizer_that_cannot_take_the_verdict_reads_it_once():
    with fake_gpu() as gpu:
        steps(gpu, MODES["torch_fp16"], lambda p: torch.optim.RMSprop(p, lr=0.1))
    assert len(gpu.found) == 2  # of two steps


def test_step_counters_are_where_they_are_read():
    """On the device for fused kernels; on the host for the plain ones of a user who gets the optimizer back."""
    with fake_gpu() as gpu:
        engine = steps(gpu, {}, adamw)
        optimizer = engine.optimizer
        optimizer.state = {p: {"step": torch.ones((), device="cuda")} for p in engine.model.parameters()}
        engine.close()
        assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}


def test_a_save_compares_all_masters_by_two_reads():
    """Of what was written without a count, and of what the masters have beyond the model."""
    with fake_gpu() as gpu:
        engine = steps(gpu, MODES["naive_fp16"], adamw)
        gpu.found.clear()
        with gpu.watch(False):
            found = engine._update.master_weights.by_name()
    assert len(found) > 3
    assert len([what for what in gpu.found if " reads" in what or "cpu" in what]) == 2, gpu.found


def test_numbers_that_have_arrived_are_not_waited_for():
    with fake_gpu() as gpu, gpu.watch(capturing=False):
        copy = HostCopy([torch.ones((), device="cuda")])
        assert not copy.arrived  # until it is asked again
        copy.read()
        assert gpu.found == []
        HostCopy([torch.ones((), device="cuda")]).read()
        [waited] = gpu.found
        assert waited.startswith("Event.synchronize")
