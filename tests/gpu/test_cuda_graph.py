"""CUDA graphs: of a whole step, where each replay is an update with its own verdict, norm and scale; and those of
compiled code, whose memory the next generation of graphs uses again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.gpu.test_on_gpu import ALL_MODES, FLOAT8, make_gpu_engine
from tests.support.models import MODES, adamw, full_weights, make_loader, sgd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.not_simulated("graphs"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [
        *(("none", sgd), ("torch_fp16", sgd), *((mode, adamw) for mode in MODES)),
        pytest.param("fp8_tensorwise", adamw, marks=FLOAT8),
    ],
)
def test_replays_are_updates(mode, optimizer):
    """Also one that overflows, because of its input."""
    growing = {"growth_interval": 3} if "fp16" in mode else {}
    config = {key: {**value, **growing} for key, value in ALL_MODES[mode].items()} | {"clip_grad_norm": 0.5}
    batches = [batch for _ in range(2) for batch in make_loader(40)]

    def run(captured):
        engine = make_gpu_engine(config, lambda p: optimizer(p))
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
            if captured and number == 3:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):  # runs nothing yet
                    step()
            if captured and number >= 3:
                graph.replay()
            else:
                step()
            scales.append(engine.loss_scale)
        return full_weights(engine), scales, engine.skipped_steps

    ours, theirs = run(True), run(False)
    assert ours[1:] == theirs[1:]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


class Block(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(super().forward(x))


@pytest.mark.parametrize(
    "config",
    [
        {"compile": {"scope": "model"}, "fp16": {"mode": "naive", "initial_scale": 256.0}},
        {"compile": {"scope": "blocks"}, "bf16": {"mode": "torch"}},
        {"compile": {"scope": "blocks"}, "activation_checkpoint": "full"},
    ],
    ids=["the model", "blocks", "blocks and recomputation"],
)
def test_compiled_code_in_graphs_trains_and_evaluates_as_without(config):
    from torch._dynamo.utils import counters

    def run(mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), *(Block(16, 16) for _ in range(3)), nn.Linear(16, 4))
        keys = config | {"compile": config["compile"] | {"mode": mode}, "clip_grad_norm": 0.5}
        engine = make_gpu_engine(keys, adamw, model, make_loader(40))
        losses = []
        for x, y in [batch for _ in range(2) for batch in engine.dataloader]:
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            with torch.no_grad():
                losses.append(engine.eval().criterion(engine(x), y).item())
            engine.train()
        engine.close()
        return losses

    torch.compiler.reset()
    counters.clear()
    found = run("reduce-overhead")
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert found == pytest.approx(run("default"), rel=2e-3)
