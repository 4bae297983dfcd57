"""A plan says what a real run holds."""

from __future__ import annotations

import pytest

from halfmesh.config.load import load_config
from halfmesh.dry_run.simulate_rank import simulate_rank
from tests.dry_run.real_runs import measure
from tests.support.llama import SMALL
from tests.support.ranks import run_ranks

PIPELINE = {"size": 2, "microbatches": 4}
LAYOUTS = {
    "torch fp16, accumulated, clipped": (
        1,
        {"fp16": {"mode": "torch"}, "gradient_accumulation": 3, "clip_grad_norm": 1.0},
    ),
    "naive fp16, dp 2 zero1": (2, {"fp16": {"mode": "naive"}, "parallel": {"data": "zero1"}}),
    "naive bf16, dp 2": (2, {"bf16": {"mode": "naive"}}),
    "naive bf16, split, dp 2 zero1": (
        2,
        {"bf16": {"mode": "naive", "masters": "split"}, "parallel": {"data": "zero1"}},
    ),
    "naive bf16, dp 2 fsdp": (2, {"bf16": {"mode": "naive"}, "parallel": {"data": "fsdp"}}),
    "fp32, dp 2 fsdp, checkpointed": (2, {"parallel": {"data": "fsdp"}, "activation_checkpoint": "full"}),
    "torch fp8, dp 2 fsdp": (2, {"fp8": {"mode": "torch"}, "parallel": {"data": "fsdp"}}),
    "torch bf16, tp 2": (2, {"bf16": {"mode": "torch"}, "parallel": {"tensor": 2}}),
    "fp32, pp 2 interleaved": (2, {"parallel": {"pipeline": PIPELINE | {"schedule": "interleaved", "chunks": 2}}}),
    "naive fp16, pp 2 x dp 2 zero1": (
        4,
        {"fp16": {"mode": "naive"}, "parallel": {"pipeline": PIPELINE, "data": "zero1"}},
    ),
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
        plan = simulate_rank(load_config(config), SMALL, (), rank, size)
        assert plan.parameters == numel
        assert plan.kept == pytest.approx(kept, rel=0.02)
        assert plan.peak == pytest.approx(peak, rel=0.10)
