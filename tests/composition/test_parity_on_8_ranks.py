"""The cells of `test_parity.py` that need 8 ranks."""

from __future__ import annotations

import pytest

from .parity import find_problems
from .test_parity import CELLS, run_cell

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.world_size == 8], ids=str)
def test_trains_to_parity(cell):
    assert not find_problems(cell, run_cell(cell))
