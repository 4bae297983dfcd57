"""The plan: two ranks train as one process does, in the package's own mode."""

from __future__ import annotations

import pytest
import torch
from halfmesh_plugin_example.gated_mlp import GatedMLP
from torch import nn

import halfmesh


def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], nn.Module]:
    """A model with such a layer, and a batch."""
    model = nn.Sequential(nn.Linear(6, 8), GatedMLP(8, 12), nn.Linear(8, 2))
    return model, (torch.randn(8, 6), torch.randint(2, (8,))), nn.CrossEntropyLoss()


def test_two_ranks_train_as_one_process() -> None:
    config = {"fp16": {"mode": "keepnorm"}, "parallel": {"tensor": 2}}
    report = halfmesh.verify(config, build, world_size=2)
    assert report.equal, str(report)


def test_which_are_divided() -> None:
    from halfmesh.parallel.tensor.plans import resolve

    found, problems = resolve(nn.Sequential(GatedMLP(8, 12)), 2, "auto", False)
    assert found
    assert not problems
    _, problems = resolve(nn.Sequential(GatedMLP(8, 7)), 2, "auto", False)
    assert any("7" in problem for problem in problems), problems


@pytest.mark.parametrize("name", ["gated_mlp", "auto"])
def test_the_config_knows_the_name(name: str) -> None:
    config = halfmesh.load_config({"parallel": {"tensor": {"size": 2, "plan": name}}})
    assert config.parallel.tensor.plan == name
