"""The data strategy: two ranks, each with its own samples, end with the weights of one that has all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfmesh

CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "clipped, accumulated": {"clip_grad_norm": 0.5, "gradient_accumulation": 2},
    "naive": {"fp16": {"mode": "naive"}},
    "lightest": {"parallel": {"data": {"strategy": "owned", "owner": "lightest"}}},
}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def train(config: dict[str, Any], folder: Path | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's state, and the optimizer's."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device="cpu")
    rank, size = engine.context.dp_rank, engine.context.dp_size
    x = torch.randn(40, 6)
    y = (x[:, 0] > 0).long()
    for step in range(10):
        if step == 6 and folder is not None:
            engine.save(folder)
            engine.load(folder)
        batch = slice(rank, None, size)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x[batch]), y[batch]))
        engine.step()
    held = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    numbers = [param.numel() for param in make().parameters()]
    shares = {"next": (sum(numbers[::2]), sum(numbers[1::2])), "lightest": (numbers[0], sum(numbers[1:]))}
    options: Any = engine.config.parallel.data
    assert held == (sum(numbers) if size == 1 else shares[options.owner][rank])
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    engine.close()
    return full["model"], full["optimizer"]["state"]


def one_of_two(rank: int, folder: str) -> None:
    for name, config in CONFIGS.items():
        found = train({"parallel": {"data": "owned"}, **config}, Path(folder) / f"saved {name}")
        torch.save(found, Path(folder) / f"{name}-{rank}.pt")


def test_parity(tmp_path: Path, start: Any) -> None:
    start(one_of_two, 2)
    for name, config in CONFIGS.items():
        expected = train({key: value for key, value in config.items() if key != "parallel"})
        for rank in range(2):
            found = torch.load(tmp_path / f"{name}-{rank}.pt")
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if name != "naive" else 5e-3)


def test_its_key_is_checked() -> None:
    with pytest.raises(halfmesh.ConfigError, match="owner: expected 'next' or 'lightest', got 'lightset'"):
        halfmesh.load_config({"parallel": {"data": {"strategy": "owned", "owner": "lightset"}}})
    with pytest.raises(halfmesh.ConfigError, match="ownr: unknown key; did you mean 'owner'"):
        halfmesh.load_config({"parallel": {"data": {"strategy": "owned", "ownr": "lightest"}}})
    with pytest.raises(halfmesh.ConfigError, match=r"owner: only strategy='owned' has this key, and .* is 'zero1'"):
        halfmesh.load_config({"parallel": {"data": {"strategy": "zero1", "owner": "lightest"}}})


def test_the_table_has_its_column() -> None:
    from halfmesh.compat import composition_table

    assert {row["owned"] for row in composition_table().values()} >= {"yes"}
