"""What a deferred model is in each layout: the same values, and of them what a rank holds."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import halfmesh
from tests.support.llama import Llama
from tests.support.ranks import rank_device, run_ranks
from tests.support.whole import close_whole

LAYOUTS = {
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": {"size": 2, "microbatches": 2}}),
    "fsdp2": (2, {"data": "fsdp"}),
    "dp2": (2, {}),
    "tp2_fsdp2": (4, {"tensor": 2, "data": "fsdp"}),
    "pp2_zero1_2": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": "zero1"}),
    "pp2_fsdp2": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": "fsdp"}),
}


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, num_heads=4, depth=2)


def llama() -> nn.Module:
    return Llama(64, 2, 4, 2, 96, 64, 16)


class Mixed(nn.Sequential):
    """Convolutions, BatchNorm with counters, weights from literals, and a parameter that is set by hand."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        self[4].weight.data.normal_(std=0.02)
        self[0].weight = nn.Parameter(self[0].weight.detach() * torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1))


MODELS = {"vit": vit, "llama": llama, "mixed": Mixed}


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def make(rank, world_size, cases):
    found = {}
    for name, (layout, model) in cases.items():
        torch.manual_seed(7)
        config = {"parallel": layout}
        engine = halfmesh.initialize(MODELS[model], sgd, nn.CrossEntropyLoss(), config=config, device=rank_device())
        found[name] = close_whole(engine)
    return found


def cells(world_size):
    """All models under layouts of that size; the Sequential has no plan for tensor parallelism."""
    return {
        f"{layout} {model}": (config, model)
        for layout, (size, config) in LAYOUTS.items()
        for model in MODELS
        if size == world_size and not ("tensor" in config and model == "mixed")
    }


@pytest.mark.promise("seeds")
@pytest.mark.promise("`model_creation(dtype)`")
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_are_the_same_in_every_layout(world_size):
    """Those of one process."""
    cases, one = cells(world_size), {}
    for model in MODELS:
        one[model] = make(0, 1, {"one": ({}, model)})["one"]
    for found in run_ranks(make, world_size, cases, timeout=240):
        for name, (_, model) in cases.items():
            assert found[name].keys() == one[model].keys()
            assert [key for key, value in one[model].items() if not torch.equal(found[name][key], value)] == [], name
