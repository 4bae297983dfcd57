"""docs/deferred.md tells the truth."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import halfmesh
from tests.docs.test_readme import find_python, stand_ins

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "deferred.md").read_text()


@pytest.fixture
def names():
    torch.manual_seed(0)
    images, labels = torch.randn(32, 16), torch.randint(4, (32,))
    dataset = torch.utils.data.TensorDataset(images, labels)
    given = stand_ins() | {"torch": torch, "halfmesh": halfmesh, "config": {}}
    return given | {"dataloader": torch.utils.data.DataLoader(dataset, batch_size=8)}


@pytest.mark.parametrize("first", ["build.py", "groups.py"])
def test_both_ways_give_the_same_values(names, first, caplog):
    exec(find_python(TEXT, "build.py"), names)
    one = names["engine"]
    weights = {name: value.clone() for name, value in one.model.state_dict().items()}
    one.close()
    with caplog.at_level(logging.INFO, "halfmesh"):
        exec(find_python(TEXT, first), names)
    assert "values:     made where they are held, one of 4 tensors at a time" in caplog.text
    engine = names["engine"]
    assert all(torch.equal(value, weights[name]) for name, value in engine.model.state_dict().items())
    for images, labels in engine.dataloader:
        engine.backward(engine.criterion(engine(images), labels))
        engine.step()
    assert engine.global_step == 4


def test_values_of_an_ordinary_build(names):
    exec(find_python(TEXT, "build.py"), names)
    torch.manual_seed(3)
    ordinary = names["build"]()
    torch.manual_seed(3)
    exec(find_python(TEXT, "from_rank0.py"), names)
    assert torch.equal(names["model"][0].weight, ordinary[0].weight)


def test_another_dtype(names):
    exec(find_python(TEXT, "build.py"), names)
    names["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.1)
    exec(find_python(TEXT, "half.py"), names)
    assert {p.dtype for p in names["engine"].model.parameters()} == {torch.bfloat16}
