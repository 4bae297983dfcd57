"""`halfmesh verify` alone: which cells it runs, and what it says."""

import itertools

import pytest

from halfmesh.compat import composition_table, get_columns
from halfmesh.parallel.registries import SCHEDULES
from halfmesh.verify.machine import EXTRAS, find_cells


def pairs(cells):
    return {pair for cell in cells for pair in itertools.combinations(cell.words, 2)}


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 8), ("cuda", 8), ("cuda", 4)])
def test_cells_stand_for_all_that_the_table_allows(device, ranks):
    cells = list(find_cells(device, ranks, float8=True))
    found = pairs(cells)
    for row, verdicts in composition_table().items():
        for column, verdict in verdicts.items():
            assert ((row, column) in found) == (verdict == "yes"), (row, column)
    strategies = set(itertools.combinations(("replicate", "zero1", "fsdp"), 2))
    if ranks > 4:
        assert set(itertools.combinations(get_columns(), 2)) - found == strategies
    assert {cell.extra for cell in cells} == set(EXTRAS)
    schedules = {cell.schedule for cell in cells if "pipeline" in cell.axes}
    assert schedules >= set(SCHEDULES.names()) - {"zero_bubble", "zbv", "dualpipev", "1f1b"}
    assert all(cell.world_size == ranks or device == "cpu" for cell in cells)
