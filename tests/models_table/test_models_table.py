"""Each cell of docs/models.md: trained to the weights of one process, or refused with its message."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.support.ranks import RankFailure, run_jobs

from .cells import LAYOUTS, Cell, all_cells, find_problems, train

for package in ("timm", "torchvision", "transformers"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

CELLS = list(all_cells())


class Results:
    """What each cell did. All cells of as many ranks run in one launch, when the first of them is asked for."""

    def __init__(self) -> None:
        self._known: dict[Cell, Any] = {}

    def of(self, cell: Cell) -> Any:
        if cell not in self._known:
            world = LAYOUTS[cell.layout].world
            group = [each for each in CELLS if LAYOUTS[each.layout].world == world]
            found = run_jobs([partial(train, cell=each) for each in group], world)
            self._known |= dict(zip(group, found, strict=True))
        return self._known[cell]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_trains_to_parity_or_is_refused(cell, results):
    outcomes = results.of(cell)
    assert not isinstance(outcomes, RankFailure), str(outcomes)
    problems = list(find_problems(cell, outcomes))
    assert not problems, "\n".join([str(cell), *problems])
