"""The cells of `test_parity.py` that need 8 ranks."""

from __future__ import annotations

import pytest

from .parity import find_problems
from .test_parity import LARGE, what_of

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("cell", "seed"), LARGE)
def test_trains_to_parity(cell, seed):
    assert not find_problems(cell, what_of(cell), seed)
