"""engine.call: other methods of the model than forward, in the mode's casts, in every layout that can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from tests.support.models import BF16_TORCH, FP16_NAIVE, FP16_TORCH, make_data, make_engine, said
from tests.support.ranks import here, run_ranks

X, _ = make_data(8)
Z = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
APEX: dict[str, Any] = {level: {"fp16": {"mode": "apex", "opt_level": level}} for level in ("O1", "O2")}


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


def check(rank: int, world_size: int, configs: list[dict[str, Any]]) -> None:
    """Methods train and compute as forward does."""
    for config in configs:
        engines = [start(config), start(config)]
        size = len(X) // engines[0].context.dp_size
        own, found = here(X[engines[0].context.dp_rank * size :][:size]), []
        for engine, by_methods in zip(engines, (True, False), strict=True):
            for _ in range(2):
                engine.zero_grad()
                output = engine.call("decode", engine.call("encoder", own)) if by_methods else engine(own)
                engine.backward(engine.criterion(output, own))
                engine.step()
            found.append(engine.full_state_dict(rank0_only=False))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4, msg=str(config))
        plain, engine = AutoEncoder(), engines[0].eval()
        plain.load_state_dict(found[0])
        with torch.no_grad():
            outputs = engine.call("decode", here(Z)), engine.call("generate", here(X), steps=3), engine(here(X))
            expected = here((plain.decode(Z), plain.generate(X, 3), plain(X)))
        assert len({output.dtype for output in outputs}) == 1, "outputs are cast as those of forward"
        close = 1e-5 if "parallel" in config and len(config) == 1 else 1e-2
        torch.testing.assert_close(outputs, expected, rtol=close, atol=close, check_dtype=False, msg=str(config))
        for engine in engines:
            engine.close()


def test_methods_compute_in_the_mode():
    check(0, 1, [{}, FP16_TORCH, BF16_TORCH, FP16_NAIVE, APEX["O1"], APEX["O2"]])


LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {}, **FP16_NAIVE},
    {"parallel": {"data": "zero1"}},
    {"parallel": {"data": "fsdp"}},
    {"parallel": {"data": "fsdp"}, **FP16_NAIVE},
    {"parallel": {"tensor": {"size": 2, "plan": {"first": "colwise", "second": "rowwise"}}}},
]


@pytest.mark.distributed
def test_methods_compute_as_in_one_process():
    run_ranks(check, 2, LAYOUTS)


def before_forward(rank: int, world_size: int) -> tuple[Any, str, str]:
    """A method is called first. Under context methods evaluate, and do not train; a stage of a pipeline has none."""
    decoded = []
    for parallel in ({"data": "fsdp"}, {"context": {"size": 2}}):
        engine = start({"parallel": parallel})
        with torch.no_grad():
            decoded.append(engine.eval().call("decode", here(Z)))
    engine.train()
    under_context = said(lambda: engine.call("decode", here(Z)))
    pipeline = {"size": 2, "partition": ["1"], "microbatches": 2}
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    piped = make_engine({"parallel": {"pipeline": pipeline}}, model=layers)
    return decoded, under_context, said(lambda: piped.call("decode", here(Z)))


@pytest.mark.distributed
def test_what_context_and_pipelines_cannot_do_is_said():
    for decoded, context, pipeline in run_ranks(before_forward, 2):
        torch.testing.assert_close(decoded, [AutoEncoder().decode(Z).detach()] * 2)
        assert "under parallel.context only forward can be trained" in context
        assert "engine.call('decode'): under parallel.pipeline this rank holds one stage" in pipeline


def test_what_the_model_does_not_have():
    engine = start(FP16_NAIVE)
    with pytest.raises(AttributeError, match="'AutoEncoder' object has no attribute 'decod'"):
        engine.call("decod", Z)
    engine.close()
    with pytest.raises(InputError, match="this engine is closed"):
        engine.call("decode", Z)
