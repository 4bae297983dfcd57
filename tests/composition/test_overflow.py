"""An overflow on one rank alone makes every rank skip, in whichever parameter it is."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.ranks import run_jobs

from .cells import Cell, Pipe
from .overflows import KINDS, find_overflow_problems, overflow

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

# The scale grows by each update that is not skipped, so that as many overflows as one likes can follow.
CELLS = [
    cell
    for mode in ("torch_fp16", "naive_fp16")
    for cell in (
        *(Cell(mode, "gpt", tensor=2, data=2, sequence_parallel=sequence) for sequence in (False, True)),
        Cell(mode, "gpt", data=2, pipeline=Pipe(2, "1f1b", 2)),
        *(Cell(mode, "gpt", tensor=2, data=2, strategy=strategy) for strategy in ("zero1", "fsdp")),
        Cell(mode, "gpt", tensor=2, pipeline=Pipe(2, "interleaved", 2, 2)),
    )
]


@pytest.fixture(scope="module")
def results():
    return dict(zip(CELLS, run_jobs([partial(overflow, cell=cell) for cell in CELLS], 4), strict=True))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_rank_skips(cell, results):
    assert isinstance(results[cell], list), str(results[cell])
    assert not find_overflow_problems(results[cell])
    assert {update.kind for update in results[cell][0][0]} == {*KINDS, ""}
