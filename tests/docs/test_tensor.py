"""docs/tensor-parallel.md tells the truth: its Python runs on ranks, its table has every style."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.compat import check
from tests.docs.test_readme import find_python, find_rows
from tests.support.ranks import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tensor-parallel.md").read_text()


class Layers(nn.Module):
    """What the page's patterns are about."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)}) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down"](nn.functional.gelu(layer["up"](x)))
        return self.head(x)


def run_plan(name, model):
    """Shapes after initialize, and the output, with the page's config `name`, or with `plan="auto"`."""
    config = {}
    if name == "auto":
        config["parallel"] = {"tensor": 2}
    else:
        exec(find_python(PAGE, name), config)
        config = {"parallel": config["parallel"]}
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    expected = model.eval()(x)
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config, device="cpu")
    assert torch.allclose(engine.eval()(x), expected, atol=1e-6)
    shapes = {name: tuple(param.shape) for name, param in engine.model.named_parameters()}
    engine.close()
    return shapes


def by_patterns(rank, world_size):
    return run_plan("pattern_config.py", Layers())


def by_registered_plan(rank, world_size):
    names = {}
    exec(find_python(PAGE, "my_plan.py"), names)
    return run_plan("auto", nn.Sequential(names["FeedForward"](6), names["FeedForward"](6)))


@pytest.mark.distributed
def test_its_plans_divide_layers():
    for shapes in run_ranks(by_patterns, 2):
        assert shapes["layers.0.up.weight"] == (4, 6)
        assert shapes["layers.1.down.weight"] == (6, 4)
        assert shapes["head.weight"] == (2, 6)
    for shapes in run_ranks(by_registered_plan, 2):
        assert shapes["1.up.weight"] == (12, 6)
        assert shapes["1.norm.weight"] == (6,)


def test_its_configs_are_valid():
    for name in ("config.py", "pattern_config.py"):
        names = {}
        exec(find_python(PAGE, name), names)
        config = halfmesh.load_config({key: value for key, value in names.items() if key in ("parallel", "bf16")})
        assert check(config, 8, "cuda") == []


def test_the_table_has_every_style():
    named = " ".join(row[0] for row in find_rows(PAGE, "style"))
    assert set(re.findall(r"`(\w+)", named)) == set(halfmesh.TENSOR_STYLES.names())
