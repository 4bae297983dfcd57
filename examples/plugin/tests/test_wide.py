"""The axis: ranks that each compute some features of every layer end with the weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.compat import check, composition_table

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (2, {"parallel": {"wide": 2}}),
    "clipped, accumulated": (
        2,
        {"clip_grad_norm": 0.1, "gradient_accumulation": 2, "parallel": {"wide": {"size": 2, "least": 4}}},
    ),
    "naive": (2, {"fp16": {"mode": "naive"}, "parallel": {"wide": 2}}),
    "data ranks": (4, {"parallel": {"wide": 2}}),
    "zero1": (4, {"clip_grad_norm": 0.1, "parallel": {"wide": 2, "data": "zero1"}}),
    "fsdp": (4, {"clip_grad_norm": 0.5, "parallel": {"wide": 2, "data": "fsdp"}}),
}


def train(config: dict[str, Any], folder: Path | None = None, dropout: float = 0.0) -> dict[str, Any]:
    """The model's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device="cpu")
    rank, size = engine.context.dp_rank, engine.context.dp_size
    x = torch.randn(40, 6)
    y = (x[:, 0] > 0).long()
    for step in range(8):
        if step == 6 and folder is not None:
            engine.save(folder)
            engine.load(folder)
        batch = slice(rank, None, size)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x[batch]), y[batch]))
        engine.step()
    if dist.is_initialized() and config["parallel"].get("data") is None:
        assert model[0].weight.shape == (4, 6)  # this rank's rows
        assert "of 2 linear layers" in str(engine.plan) or "least" in str(config)
    if folder is not None:
        engine.save_weights(folder / "whole.safetensors")
    weights = engine.full_state_dict(rank0_only=False)
    engine.close()
    return weights


def one_of_many(rank: int, folder: str) -> None:
    for name, (ranks, config) in CONFIGS.items():
        if ranks == dist.get_world_size():
            torch.save(train(config, Path(folder) / f"saved {name}"), Path(folder) / f"{name}-{rank}.pt")


@pytest.mark.parametrize("size", [2, 4])
def test_parity(tmp_path: Path, size: int, start: Any) -> None:
    start(one_of_many, size)
    for name, (ranks, config) in CONFIGS.items():
        if ranks != size:
            continue
        expected = train({key: value for key, value in config.items() if key != "parallel"})
        for rank in range(size):
            found = torch.load(tmp_path / f"{name}-{rank}.pt")
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if name != "naive" else 5e-3)


def test_the_table_has_its_column_and_keys_are_checked() -> None:
    rows = composition_table()
    assert {rows[row]["wide"] for row in ("none", "torch fp16", "naive bf16")} == {"yes"}
    assert rows["apex fp16"]["wide"] == "rejected"
    config = halfmesh.load_config({"parallel": {"wide": 2, "tensor": 2}})
    assert [finding.where for finding in check(config, 4)] == ["parallel.tensor"]
    config = halfmesh.load_config({"parallel": {"wide": 2}})
    assert any("wide=2" in finding.message for finding in check(config, 3))
    with pytest.raises(halfmesh.ConfigError, match=r"parallel.wide.most: unknown key"):
        halfmesh.load_config({"parallel": {"wide": {"size": 2, "most": 4}}})
    with pytest.raises(halfmesh.ConfigError, match=r"parallel.wide: expected a whole number, got "):
        halfmesh.load_config({"parallel": {"wide": "2"}})


def test_a_model_without_such_layers_is_rejected() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    from halfmesh_plugin_example.wide import Wide, WideOptions

    from halfmesh.parallel.axis import PlanInputs

    found, problems = Wide.plan(PlanInputs(model, optimizer, None, None, WideOptions(size=2)))
    assert not found
    assert "parallel.wide" in problems[0]
