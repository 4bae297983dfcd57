"""The smallest change by which a run would fit."""

from __future__ import annotations

import pytest

from halfmesh.config.load import load_config
from halfmesh.plan.advice import Asked, find_change
from halfmesh.plan.dry_run import dry_run, needed
from tests.support.llama import SMALL, WIDE

NAIVE = {"bf16": {"mode": "naive"}}
ZERO1 = {"parallel": {"data": "zero1"}}
FULL = {"activation_checkpoint": "full"}


def advise(config, part, world_size=4, model=SMALL):
    """The change for a device with `part` of what is needed, and that in bytes."""
    config = load_config(config)
    run = dry_run(config, world_size, model)
    limit = round(part * needed(run.largest[1]))
    return find_change(config, Asked(run, world_size, "cuda", limit, model)), limit


@pytest.mark.parametrize(
    ("config", "part", "what"),
    [
        (NAIVE, 0.99, "zero1 (parallel = dict(data='zero1'))"),
        (NAIVE | ZERO1, 0.8, "activation_checkpoint = 'selective'"),
        (NAIVE, 0.7, "activation_checkpoint = 'full'"),
        (NAIVE, 0.6, "batches of 2 rows in place of 8, with gradient_accumulation=4"),
        ({"parallel": {"data": "fsdp"}} | FULL, 0.9, "batches of 4 rows in place of 8, with gradient_accumulation=2"),
        (NAIVE, 0.5, "parallel.tensor=4 in place of 1"),
        (NAIVE, 0.45, "zero1 and activation_checkpoint = 'full'"),
    ],
)
def test_the_smallest_change(config, part, what):
    change, limit = advise(config, part)
    assert change.what == what
    assert change.bytes <= limit
    assert change.is_estimate == ("checkpoint" not in what)
    rows = 8 // change.config.gradient_accumulation
    real = dry_run(change.config, 4, SMALL, (f"{rows},32:int64",))
    assert change.bytes == pytest.approx(needed(real.largest[1]), rel=0.15)


def test_fsdp_after_zero1():
    change, limit = advise(NAIVE | ZERO1, 0.7, 16, WIDE)
    assert change.what == "fsdp (parallel = dict(data='fsdp'))"
    real = dry_run(change.config, 16, WIDE)
    assert needed(real.largest[1]) <= limit
    assert change.bytes == pytest.approx(needed(real.largest[1]), rel=0.1)


def test_tensor_ranks_that_the_model_has():
    change, _ = advise({"parallel": {"tensor": 2}}, 0.55, 4, WIDE)
    assert change.what == "parallel.tensor=4 in place of 2"
    change, _ = advise({"parallel": {"tensor": 8}}, 0.55, 16, WIDE)  # of 8 heads of keys and values
    assert change is None or "parallel.tensor" not in change.what


def test_nothing_is_enough():
    change, _ = advise(NAIVE, 0.001)
    assert change is None
