"""The plan: two ranks end with the weights of one, in fp32 and in the package's own mode."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from halfmesh_plugin_example.gated_mlp import GatedMLP
from torch import nn

import halfmesh

CONFIGS: dict[str, dict[str, Any]] = {"fp32": {}, "keepnorm": {"fp16": {"mode": "keepnorm"}}}


def train(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), GatedMLP(8, 12), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(40, 6)
    y = (x[:, 0] > 0).long()
    with halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device="cpu") as engine:
        ranks = engine.context.tp_size
        assert engine.model.get_parameter("1.gate.weight").shape == (12 // ranks, 8)
        for _ in range(10):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        engine.close(restore=True)
    return {name: value.clone() for name, value in model.state_dict().items()}  # whole again


def one_of_two(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for name, config in CONFIGS.items():
        weights = train({**config, "parallel": {"tensor": 2}})
        torch.save(weights, Path(folder) / f"{name}-{rank}.pt")
    dist.destroy_process_group()


def test_parity(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(one_of_two, args=(port, str(tmp_path)), nprocs=2)
    expected = train({})
    for name, tolerance in (("fp32", 1e-5), ("keepnorm", 2e-3)):
        for rank in range(2):
            weights = torch.load(tmp_path / f"{name}-{rank}.pt")
            for key, value in expected.items():
                torch.testing.assert_close(weights[key], value, rtol=0, atol=tolerance, msg=f"{name}, {key}")


def test_what_does_not_divide(tmp_path: Path) -> None:
    from halfmesh.parallel.tensor.checks import resolve

    _, problems = resolve(nn.Sequential(GatedMLP(8, 7)), 2, "auto", False)
    assert any("7" in problem for problem in problems), problems


@pytest.mark.parametrize("name", ["gated_mlp", "auto"])
def test_the_config_knows_the_name(name: str) -> None:
    config = halfmesh.load_config({"parallel": {"tensor": {"size": 2, "plan": name}}})
    assert config.parallel.tensor.plan == name
