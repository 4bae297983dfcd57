"""A plan says what a real run holds."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import optim

import halfmesh
from halfmesh.config.load import load_config
from halfmesh.dry_run.simulate_rank import simulate_rank
from tests.support import llama
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.real_memory import RealTracker

PIPELINE = {"size": 2, "microbatches": 4}
ZERO1, FSDP = {"parallel": {"data": "zero1"}}, {"parallel": {"data": "fsdp"}}
NAIVE_FP16, NAIVE_BF16 = {"fp16": {"mode": "naive"}}, {"bf16": {"mode": "naive"}}
SPLIT = {"bf16": {"mode": "naive", "masters": "split"}}
INTERLEAVED = {"parallel": {"pipeline": PIPELINE | {"schedule": "interleaved", "chunks": 2}}}
ACCUMULATED = {"fp16": {"mode": "torch"}, "gradient_accumulation": 3, "clip_grad_norm": 1.0}
LAYOUTS = {
    "torch fp16, accumulated, clipped": (1, ACCUMULATED),
    "naive fp16, dp 2 zero1": (2, NAIVE_FP16 | ZERO1),
    "naive bf16, dp 2": (2, NAIVE_BF16),
    "naive bf16, split, dp 2 zero1": (2, SPLIT | ZERO1),
    "naive bf16, dp 2 fsdp": (2, NAIVE_BF16 | FSDP),
    "fp32, dp 2 fsdp, checkpointed": (2, FSDP | {"activation_checkpoint": "full"}),
    "torch fp8, dp 2 fsdp": (2, FSDP | {"fp8": {"mode": "torch"}}),
    "torch bf16, tp 2": (2, {"bf16": {"mode": "torch"}, "parallel": {"tensor": 2}}),
    "fp32, pp 2 interleaved": (2, INTERLEAVED),
    "naive fp16, pp 2 x dp 2 zero1": (4, NAIVE_FP16 | {"parallel": {"pipeline": PIPELINE, "data": "zero1"}}),
}
QUICK = [*LAYOUTS][:2]
CELLS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK) + [pytest.mark.sends] * ("pp 2" in name))
    for name in LAYOUTS
]


def measure(rank, world_size, config):
    """Bytes between two updates and at most within one, and elements of the parameters, of a run of `llama.small`."""
    torch.manual_seed(0)
    model, (inputs, targets), criterion = here(llama.small())
    tracker = RealTracker([inputs])
    with tracker:
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
            assert engine.global_step == step + 1
    numel = sum(param.numel() for param in engine.model.parameters())
    engine.close()
    return kept, tracker.peak, numel


@pytest.mark.promise("20 bytes per parameter for Adam in fp16")
@pytest.mark.parametrize("name", CELLS)
def test_bytes_are_those_of_a_run(name):
    size, config = LAYOUTS[name]
    for rank, (kept, peak, numel) in enumerate(run_ranks(measure, size, config, init=size > 1)):
        plan = simulate_rank(load_config(config), llama.SMALL, (), rank, size)
        assert plan.parameters == numel
        assert plan.kept == pytest.approx(kept, rel=0.02)
        assert plan.peak == pytest.approx(peak, rel=0.10)
