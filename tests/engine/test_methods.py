"""engine.call: other methods of the model than forward, in the mode's casts, in every layout that can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from tests.support.models import (
    FP16_NAIVE,
    MODES,
    TOLERANCES,
    difference,
    full_weights,
    make_data,
    make_engine,
    said,
    sgd,
)
from tests.support.ranks import here, run_ranks

X, _ = make_data(8)
Z = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": {"size": 2, "plan": {"first": "colwise", "second": "rowwise"}}},
    "context": {"context": {"size": 2}},
}


class AutoEncoder(nn.Module):
    """`decode` uses a parameter of the model itself, and `generate` calls forward several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(8, 4)
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 8)
        self.shift = nn.Parameter(torch.full((8,), 0.5))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(z).tanh()) + self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encoder(x))

    def generate(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def start(config: dict[str, Any] | None = None) -> Any:
    return make_engine(config, model=AutoEncoder(), optimizer=sgd, criterion=nn.functional.mse_loss)


def train(engine: Any) -> None:
    """Two updates; the model is trained by its methods."""
    size = len(X) // engine.context.dp_size
    own = here(X[engine.context.dp_rank * size :][:size])
    for _ in range(2):
        engine.zero_grad()
        engine.backward(engine.criterion(engine.call("decode", engine.call("encoder", own)), own))
        engine.step()


def evaluated(engine: Any) -> dict[str, torch.Tensor]:
    engine.eval()
    with torch.no_grad():
        found = {"decode": engine.call("decode", here(Z))}
        if "cp" not in engine.context.sizes:  # whose forward takes sequences
            found |= {"generate": engine.call("generate", here(X), steps=3), "forward": engine(here(X))}
    return found


def by_hand(trains: bool = True) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """What plain fp32 gives: outputs and the model."""
    model = AutoEncoder()
    optimizer = sgd(model.parameters())
    for _ in range(2 if trains else 0):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), X).backward()
        optimizer.step()
    with torch.no_grad():
        outputs = {"decode": model.decode(Z), "generate": model.generate(X, 3), "forward": model(X)}
    return outputs, model


@pytest.mark.promise(
    "other methods than forward",
    "`engine.call`: as in one process, in every layout that can",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.parametrize("mode", MODES)
def test_methods_compute_in_the_mode(mode):
    engine = start(MODES[mode])
    train(engine)
    expected, model = by_hand()
    assert difference(full_weights(engine), model) < TOLERANCES[mode]
    found = evaluated(engine)
    assert found["decode"].dtype == found["forward"].dtype, "outputs are cast as those of forward"
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2, check_dtype=False)


def in_a_layout(rank: int, world_size: int, layout: str, config: dict[str, Any]) -> Any:
    engine = start({"parallel": LAYOUTS[layout], **config})
    first = evaluated(engine)["decode"]  # before any forward
    engine.train()
    if layout != "context":
        train(engine)
    refused = said(lambda: engine.call("decode", here(Z)))
    return first, evaluated(engine), engine.full_state_dict(rank0_only=False), refused


@pytest.mark.promise("other methods than forward")
@pytest.mark.distributed
@pytest.mark.parametrize(("mode", "close"), [("none", 1e-5), ("naive_fp16", 1e-2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_methods_compute_as_in_one_process(layout, mode, close):
    expected, model = by_hand(trains=layout != "context")
    before, _ = by_hand(trains=False)
    for first, found, trained, refused in run_ranks(in_a_layout, 2, layout, MODES[mode]):
        torch.testing.assert_close(first, before["decode"], rtol=close, atol=close)
        torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=close, atol=close)
        assert difference(trained, model) < TOLERANCES[mode]
        assert (layout == "context") == ("under parallel.context only forward is trained" in refused)


def in_a_pipeline(rank: int, world_size: int) -> str:
    pipeline = {"size": 2, "partition": ["second"], "microbatches": 2}
    layers = nn.Sequential()
    for name, layer in (("first", nn.Linear(8, 8)), ("second", nn.Linear(8, 8))):
        layers.add_module(name, layer)
    engine = make_engine({"parallel": {"pipeline": pipeline}}, model=layers)
    return said(lambda: engine.call("decode", here(Z)))


@pytest.mark.distributed
def test_a_pipeline_says_why_it_cannot():
    for message in run_ranks(in_a_pipeline, 2):
        assert "engine.call('decode'): under parallel.pipeline this rank has a stage of the model" in message


def test_what_the_model_does_not_have():
    engine = start(FP16_NAIVE)
    with pytest.raises(AttributeError, match="'AutoEncoder' object has no attribute 'decod'"):
        engine.call("decod", Z)
    engine.close()
    with pytest.raises(InputError, match="this engine is closed"):
        engine.call("decode", Z)
