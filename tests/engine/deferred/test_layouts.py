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

PIPELINE = {"pipeline": {"size": 2, "microbatches": 2}}
MASTERS = {"bf16": {"mode": "naive"}}
LAYOUTS = {
    2: {
        "tp": {"parallel": {"tensor": 2}},
        "pp": {"parallel": PIPELINE},
        "dp": {},
        "fsdp, masters": {"parallel": {"data": "fsdp"}, **MASTERS},
        "zero1, masters": {"parallel": {"data": "zero1"}, **MASTERS},
    },
    4: {
        "pp, zero1": {"parallel": PIPELINE | {"data": "zero1"}},
        "tp, fsdp": {"parallel": {"tensor": 2, "data": "fsdp"}},
    },
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


def make(rank, world_size, layouts):
    """The weights by layout and model; the Sequential has no plan for tensor parallelism."""
    found = {}
    for layout, config in layouts.items():
        for name, model in MODELS.items():
            if "tp" in layout and model is Mixed:
                continue
            torch.manual_seed(7)
            engine = halfmesh.initialize(model, sgd, nn.CrossEntropyLoss(), config=config, device=rank_device())
            found[layout, name] = close_whole(engine)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_are_those_of_one_process_in_every_layout(world_size):
    one = make(0, 1, {"one": {}})
    for found in run_ranks(make, world_size, LAYOUTS[world_size], timeout=240):
        for (layout, model), weights in found.items():
            expected = one["one", model]
            assert weights.keys() == expected.keys()
            assert [key for key, value in expected.items() if not torch.equal(weights[key], value)] == [], layout
