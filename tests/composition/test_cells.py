"""The composition table, its cells, and what is rejected: a combination is trained to parity or raises its message."""

import re

import pytest

from halfmesh.amp.plugin import PRECISIONS
from halfmesh.compat import composition_table, get_columns, get_rows, raise_for
from halfmesh.errors import IncompatibleConfigError
from tests.support.versions import SPLIT_SCHEDULES

from .cells import AXES, EXPERTS, MODES, covering, every, few, groups, product
from .page import PAGE, findings_of_table, render
from .workloads import WORKLOADS

TRAINED = [mode for mode in MODES if "apex" not in mode and mode != "naive_fp8"]
"""Modes that work with every kind of parallelism."""


@pytest.mark.promise("pipelines take the naive mode only")
def test_every_pair_of_values_is_in_a_covering_cell_and_every_mode_with_every_model():
    plain = [cell for cell in covering() if cell not in EXPERTS]
    found = {pair for cell in plain for pair in groups(cell, 2)}
    assert found >= {pair for cell in product() if cell.world_size <= 4 for pair in groups(cell, 2)}
    values = {(axis, value) for axis in AXES for value in AXES[axis]}
    rejected = {("mode", mode) for mode in ("apex_bf16", "naive_fp8", "apex_fp8")}
    assert {value for pair in found for value in pair} == values - rejected
    for kind in ("tensor", "pipeline"):  # divided, and cut
        cells = {(cell.mode, cell.model) for cell in plain if kind in cell.kinds}
        assert cells == {(mode, model) for mode in TRAINED for model in WORKLOADS}


@pytest.mark.parametrize("column", get_columns())
@pytest.mark.parametrize("row", get_rows(), ids=str)
def test_a_cell_of_the_table_is_trained_or_rejected(row, column):
    verdict = composition_table()[str(row)][column]
    if verdict == "yes":
        few_or_more = EXPERTS if column == "expert" else few()  # of experts' cells most are slow
        assert any(MODES[cell.mode].row == row and column in cell.kinds for cell in few_or_more)
        return
    why_not = row.plugin.composes.why_not
    words = why_not.get(PRECISIONS[row.key]) or why_not.get(column) or f"has no {row.key}"
    with pytest.raises(IncompatibleConfigError, match=re.escape(words)):
        raise_for(findings_of_table(row, column))


def test_whatever_is_not_trained_is_rejected():
    rejected = [cell for cell in set(every()) - set(product()) if not cell.divides_unknown_sequence]
    assert {cell.mode for cell in rejected} == set(MODES)
    for cell in rejected:
        with pytest.raises(IncompatibleConfigError):
            raise_for(cell.findings())


@pytest.mark.skipif(not SPLIT_SCHEDULES, reason="before torch 2.13 there are fewer schedules to combine")
def test_the_page_is_what_is_generated():
    assert PAGE.read_text() == render(), "write it again: .venv/bin/python -m tests.composition.page"
