"""Every allowed cell trains to parity with one process in fp32, by torch alone.

The few cells of `covering()`; with COMPOSITION=full in the environment all of `thorough()`.
"""

from __future__ import annotations

import itertools
import os
from functools import partial

import pytest

from tests.support.ranks import RankFailure, run_jobs

from .cells import Cell, Pipe, covering, thorough
from .parity import find_problems
from .training import Outcome, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

OTHERS = (
    Cell("none", "gpt2", pipeline=Pipe(2, "1f1b", 2)),
    Cell("naive_fp16", "gpt2", pipeline=Pipe(2, "interleaved", 4, 2)),
    Cell("torch_bf16", "gpt2", data=2, pipeline=Pipe(2, "gpipe", 4)),
)
CELLS = sorted(
    (*(thorough() if os.environ.get("COMPOSITION") == "full" else covering()), *OTHERS), key=lambda c: c.world_size
)
AT_ONCE = 24
"""Cells of one launch."""


class Results:
    """What the cells did. A cell's whole group is launched when the first of it is asked for."""

    def __init__(self) -> None:
        self._groups: dict[Cell, tuple[Cell, ...]] = {}
        self._known: dict[Cell, list[Outcome] | RankFailure] = {}
        for _, cells in itertools.groupby(CELLS, key=lambda cell: cell.world_size):
            alike = tuple(cells)
            for begin in range(0, len(alike), AT_ONCE):
                group = alike[begin : begin + AT_ONCE]
                self._groups |= dict.fromkeys(group, group)

    def of(self, cell: Cell) -> list[Outcome] | RankFailure:
        if cell not in self._known:
            group = self._groups[cell]
            found = run_jobs([partial(train, cell=each) for each in group], cell.world_size)
            self._known |= dict(zip(group, found, strict=True))
        return self._known[cell]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_trains_to_parity(cell, results):
    problems = find_problems(cell, results.of(cell))
    assert not problems, "\n".join([str(cell), *problems])
