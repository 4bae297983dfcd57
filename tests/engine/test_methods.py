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
)
from tests.support.ranks import here, run_ranks

X, _ = make_data(8)
Z = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
CELLS: dict[str, tuple[dict[str, Any], str]] = {
    "replicate": ({}, "naive_fp16"),
    "zero1": ({"data": "zero1"}, "none"),
    "fsdp": ({"data": "fsdp"}, "none"),
    "fsdp in half precision": ({"data": "fsdp"}, "naive_fp16"),
    "tensor": ({"tensor": {"size": 2, "plan": {"first": "colwise", "second": "rowwise"}}}, "none"),
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
    return make_engine(config, model=AutoEncoder(), criterion=nn.functional.mse_loss)


def train(engine: Any) -> None:
    """Two updates; the model is trained by its methods."""
    size = len(X) // engine.context.dp_size
    own = here(X[engine.context.dp_rank * size :][:size])
    for _ in range(2):
        engine.zero_grad()
        engine.backward(engine.criterion(engine.call("decode", engine.call("encoder", own)), own))
        engine.step()


@torch.no_grad()
def evaluated(engine: Any) -> dict[str, torch.Tensor]:
    engine.eval()
    outputs = engine.call("decode", here(Z)), engine.call("generate", here(X), steps=3), engine(here(X))
    engine.train()
    return dict(zip(("decode", "generate", "forward"), outputs, strict=True))


def by_hand() -> tuple[list[dict[str, torch.Tensor]], nn.Module]:
    """What plain fp32 gives: outputs before and after training, and the model."""
    engine = start()
    engine.close()
    model, optimizer, found = engine.model, engine.optimizer, []
    for step in range(3):
        with torch.no_grad():
            found.append({"decode": model.decode(Z), "generate": model.generate(X, 3), "forward": model(X)})
        if step < 2:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(X), X).backward()
            optimizer.step()
    return [found[0], found[2]], model


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
    (_, expected), model = by_hand()
    assert difference(full_weights(engine), model) < TOLERANCES[mode]
    found = evaluated(engine)
    assert found["decode"].dtype == found["forward"].dtype, "outputs are cast as those of forward"
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2, check_dtype=False)


def in_layouts(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name, (parallel, mode) in CELLS.items():
        engine = start({"parallel": parallel, **MODES[mode]})
        before = evaluated(engine)  # by a method first, before any forward
        train(engine)
        found[name] = [before, evaluated(engine)], engine.full_state_dict(rank0_only=False)
        engine.close()
    return found


@pytest.mark.promise("other methods than forward")
@pytest.mark.distributed
def test_methods_compute_as_in_one_process():
    expected, model = by_hand()
    for by_layout in run_ranks(in_layouts, 2):
        for name, (outputs, trained) in by_layout.items():
            mode = CELLS[name][1]
            close = 1e-5 if mode == "none" else 1e-2
            torch.testing.assert_close(outputs, expected, rtol=close, atol=close, msg=name)
            assert difference(trained, model) < TOLERANCES[mode], name


def where_it_is_limited(rank: int, world_size: int) -> tuple[torch.Tensor, str, str]:
    """Under context methods evaluate, and do not train; a stage of a pipeline has none."""
    engine = start({"parallel": {"context": {"size": 2}}})
    with torch.no_grad():
        decoded = engine.eval().call("decode", here(Z))
    engine.train()
    under_context = said(lambda: engine.call("decode", here(Z)))
    engine.close()
    pipeline = {"size": 2, "partition": ["1"], "microbatches": 2}
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    piped = make_engine({"parallel": {"pipeline": pipeline}}, model=layers)
    return decoded, under_context, said(lambda: piped.call("decode", here(Z)))


@pytest.mark.distributed
def test_what_context_and_pipelines_cannot_do_is_said():
    for decoded, context, pipeline in run_ranks(where_it_is_limited, 2):
        torch.testing.assert_close(decoded, AutoEncoder().decode(Z).detach())
        assert "under parallel.context only forward is trained" in context
        assert "engine.call('decode'): under parallel.pipeline this rank has a stage of the model" in pipeline


def test_what_the_model_does_not_have():
    engine = start(FP16_NAIVE)
    with pytest.raises(AttributeError, match="'AutoEncoder' object has no attribute 'decod'"):
        engine.call("decod", Z)
    engine.close()
    with pytest.raises(InputError, match="this engine is closed"):
        engine.call("decode", Z)
