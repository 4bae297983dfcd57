"""The cells of `test_parity.py` that need 8 ranks."""

from __future__ import annotations

import pytest

from . import test_parity
from .test_parity import LARGE, LARGE_LAYOUTS

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("cell", "seed"), LARGE)
def test_trains_to_parity(cell, seed):
    test_parity.test_trains_to_parity(cell, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "seed"), LARGE_LAYOUTS)
def test_layouts_train_to_parity_in_float64(cell, seed):
    test_parity.test_layouts_train_to_parity_in_float64(cell, seed)
