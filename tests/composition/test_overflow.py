"""An overflow on one rank alone makes every rank skip, in whichever parameter it is."""

from __future__ import annotations

import pytest

from .cells import Cell, Pipe
from .overflows import KINDS, find_overflow_problems, overflow
from .training import run_cell

pytestmark = pytest.mark.distributed

# The scale grows by each update that is not skipped, so that as many overflows as one likes can follow.
LAYOUTS = (
    {"tensor": 2, "data": 2, "sequence_parallel": True},
    {"data": 2, "pipeline": Pipe(2, "1f1b", 2)},
    {"tensor": 2, "data": 2, "strategy": "zero1"},
    {"tensor": 2, "data": 2, "strategy": "fsdp"},
    {"tensor": 2, "pipeline": Pipe(2, "interleaved", 2, 2)},
)
CELLS = [
    Cell("torch_fp16", "gpt", tensor=2, data=2),
    *(Cell("naive_fp16", "gpt", **layout) for layout in LAYOUTS),
    *(pytest.param(Cell("torch_fp16", "gpt", **layout), marks=pytest.mark.slow) for layout in LAYOUTS),
]


@pytest.mark.promise(
    "static and dynamic loss scale, also under tensor and pipeline",
    "all ranks skip together, even if only one overflows",
    of="SageMaker",
    page="composition.md",
)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_rank_skips(cell):
    results = run_cell(cell, overflow, cell)
    assert not find_overflow_problems(results)
    assert {update.kind for update in results[0][0]} == {*KINDS, ""}
