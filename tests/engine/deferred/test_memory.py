"""What a rank has in memory while it gets its part of a deferred model."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.llama import Llama
from tests.support.ranks import rank_device, run_ranks
from tests.support.real_memory import RealTracker

sgd = partial(torch.optim.SGD, lr=0.1)
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2}}
LAYOUTS = {
    1: {"one": {}},
    2: {"fsdp2": {"data": "fsdp"}, "tp2": {"tensor": 2}, "pp2": PIPELINE},
    4: {"tp2 x fsdp2": {"tensor": 2, "data": "fsdp"}, "pp2 x fsdp2": PIPELINE | {"data": "fsdp"}},
}


def wide():
    return Llama(128, 12, 4, 4, 512, 256, 16)


def sizes():
    """Bytes of the whole model, of its largest block, and of its largest tensor."""
    with torch.device("meta"):
        model = wide()
    tensors = [*model.parameters(), *model.buffers()]
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return 4 * sum(t.numel() for t in tensors), 4 * block, 4 * max(t.numel() for t in tensors)


def measure(rank, world_size, layouts, how):
    """For each layout the bytes that the engine holds at the end, and the most at once before."""
    found = {}
    for name, parallel in layouts.items():
        torch.manual_seed(0)
        tracker = RealTracker()
        with tracker:
            gc.collect()
            before = tracker.alive
            model = wide if how == "deferred" else wide()
            config = {"parallel": parallel}
            engine = halfmesh.initialize(model, sgd, nn.CrossEntropyLoss(), config=config, device=rank_device())
            del model
            found[name] = tracker.settled() - before, tracker.peak - before
        engine.close()
        del engine
    return found


def more_than_held(name):
    """Bytes: a tensor as it is drawn, whole, and cut; or, under fsdp, a block as FSDP2 gathers it, and its buffer.
    (Of memory that FSDP2 gives up the tracker hears a block later.)"""
    _, block, tensor = sizes()
    return 3.1 * block if "fsdp" in name else 2.1 * tensor


@pytest.mark.promise(
    "`model_creation(dtype)`, models larger than host memory",
    "each rank creates only its part",
    of="SageMaker",
    page="memory.md",
)
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_has_what_it_holds_and_one_tensor_or_block_more(world_size):
    whole, _, _ = sizes()
    for found in run_ranks(measure, world_size, LAYOUTS[world_size], "deferred", timeout=120):
        for name, (held, peak) in found.items():
            parts = len(name.split(" x ")) * 2 if world_size > 1 else 1
            assert held < 1.25 * whole / parts, name  # whatever is whole on all ranks counts, too
            assert peak - held <= more_than_held(name), name
            assert peak < 0.8 * whole or world_size == 1, name


@pytest.mark.distributed
def test_of_an_ordinary_build_each_rank_has_all_of_it():
    whole, _, _ = sizes()
    for found in run_ranks(measure, 2, {"fsdp2": {"data": "fsdp"}}, "eager", timeout=120):
        assert found["fsdp2"][1] >= whole
