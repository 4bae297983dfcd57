"""A plan says what a real run holds."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import optim

import halfmesh
from halfmesh.dry_run.simulate_rank import simulate_rank
from tests.support import llama
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.real_memory import RealTracker


def measure(rank, world_size, config):
    """Bytes between two updates and at most within one, and elements of the parameters, of a run of `llama.small`."""
    torch.manual_seed(0)
    _, (inputs, targets), criterion = here(llama.small())
    with RealTracker([inputs]) as tracker:
        gc.collect()
        model, _, criterion = llama.small()
        engine = halfmesh.initialize(model, optim.AdamW, criterion, config=config, device=rank_device())
        for step in range(3):
            engine.zero_grad()
            if step == 2:
                kept = tracker.peak = tracker.settled()
            for _ in range(engine.config.gradient_accumulation):
                loss = engine.criterion(engine(inputs), targets)
                engine.backward(loss)
                del loss
                engine.step()
    numel = sum(param.numel() for param in engine.model.parameters())
    engine.close()
    return kept, tracker.peak, numel


PIPELINE = {"size": 2, "microbatches": 4}
LAYOUTS = {
    "torch fp16": (1, {"fp16": {"mode": "torch"}, "gradient_accumulation": 3, "clip_grad_norm": 1.0}),
    "naive fp16, zero1": (2, {"fp16": {"mode": "naive"}, "parallel": {"data": "zero1"}}),
    "naive bf16": (2, {"bf16": {"mode": "naive"}}),
    "split, zero1": (2, {"bf16": {"mode": "naive", "masters": "split"}, "parallel": {"data": "zero1"}}),
    "naive bf16, fsdp": (2, {"bf16": {"mode": "naive"}, "parallel": {"data": "fsdp"}}),
    "fp32, fsdp, checkpointed": (2, {"parallel": {"data": "fsdp"}, "activation_checkpoint": "full"}),
    "torch fp8, fsdp": (2, {"fp8": {"mode": "torch"}, "parallel": {"data": "fsdp"}}),
    "torch bf16, tp 2": (2, {"bf16": {"mode": "torch"}, "parallel": {"tensor": 2}}),
    "fp32, pp 2": (2, {"parallel": {"pipeline": PIPELINE | {"schedule": "interleaved", "chunks": 2}}}),
    "naive fp16, pp 2, zero1": (4, {"fp16": {"mode": "naive"}, "parallel": {"pipeline": PIPELINE, "data": "zero1"}}),
}
QUICK = [*LAYOUTS][:2]
CELLS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK) + [pytest.mark.sends] * ("pp 2" in name))
    for name in LAYOUTS
]


@pytest.mark.promise("20 bytes per parameter for Adam in fp16")
@pytest.mark.parametrize("name", CELLS)
def test_bytes_are_those_of_a_run(name):
    size, config = LAYOUTS[name]
    for rank, (kept, peak, numel) in enumerate(run_ranks(measure, size, config, init=size > 1)):
        plan = simulate_rank(halfmesh.load_config(config), llama.SMALL, (), rank, size)
        assert plan.parameters == numel
        assert plan.kept == pytest.approx(kept, rel=0.02)
        assert plan.peak == pytest.approx(peak, rel=0.10)
