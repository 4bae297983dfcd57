"""A whole step in a CUDA graph: each replay is an update, with its own verdict, norm and scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.models import MLP, MODES, adamw, full_weights, make_loader, sgd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.not_simulated("graphs"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("mode", "optimizer"), [("none", sgd), ("torch_fp16", sgd), *((mode, adamw) for mode in MODES)]
)
def test_replays_are_updates(mode, optimizer):
    """Also one that overflows, because of its input."""
    growing = {"growth_interval": 3} if "fp16" in mode else {}
    config = {key: {**value, **growing} for key, value in MODES[mode].items()} | {"clip_grad_norm": 0.5}
    batches = [batch for _ in range(2) for batch in make_loader(40)]

    def run(captured):
        engine = halfmesh.initialize(MLP(), lambda p: optimizer(p), nn.CrossEntropyLoss(), None, config, device="cuda")
        x, y = (tensor.cuda() for tensor in batches[0])
        factor = torch.ones((), device="cuda")
        scales = []

        def step():
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y) * factor)
            engine.step()

        graph = torch.cuda.CUDAGraph()
        for number, (inputs, targets) in enumerate(batches):
            x.copy_(inputs)
            y.copy_(targets)
            factor.fill_(math.inf if number == 6 and "fp16" in mode else 1.0)
            if not captured or number < 3:
                step()
            else:
                if number == 3:
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph):  # runs nothing yet
                        step()
                graph.replay()
            scales.append(engine.loss_scale)
        return full_weights(engine), scales, engine.skipped_steps

    ours, theirs = run(True), run(False)
    assert ours[1:] == theirs[1:]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
