"""What only a GPU would show, without one: where a step waits for the device, or could not be captured in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.fake_gpu import fake_gpu, give_gradients
from tests.support.models import MLP, MODES, adamw, sgd

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch for CUDA")

CASES = {
    "torch_fp16": (MODES["torch_fp16"], adamw),
    "naive_verbose": ({"fp16": {"mode": "naive", "verbose": True}}, sgd),
    "two_losses_O2": ({"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2}}, adamw),
    "weighted": ({"loss_reduction": "weighted", "fp16": {"mode": "torch"}}, adamw),
}


def steps(gpu, config, optimizer, capturing=False):
    """Of 4 steps the last is watched, and captured where that is asked for."""
    with torch.device("cuda", 0):
        model = MLP()
        x, y = torch.empty(8, 8), torch.zeros(8, dtype=torch.int64)
    weighted = config.get("loss_reduction") == "weighted"

    def criterion(output, target):
        loss = nn.functional.cross_entropy(output, target)
        return (loss, 3) if weighted else loss

    # A new function: what is kept of an optimizer must not be that of another test.
    config = config | {"clip_grad_norm": 0.5}
    engine = halfmesh.initialize(model, lambda p: optimizer(p), criterion, None, config, device="cuda")

    def step():
        engine.zero_grad()
        output = engine(x)
        for loss_id in range(config.get("fp16", {}).get("num_losses", 1)):
            engine.backward(engine.criterion(output, y), loss_id, retain_graph=True)
        engine.step()

    with give_gradients(gpu, engine.model.parameters):
        for _ in range(3):
            step()
        with gpu.watch(capturing):
            step()


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_within_a_capture_or_outside(name):
    for capturing in (True, False):
        with fake_gpu() as gpu:
            steps(gpu, *CASES[name], capturing=capturing)
        assert gpu.found == []
