"""docs/composition.md says what the table and the cells say."""

from __future__ import annotations

import pytest

from tests.support.versions import SPLIT_SCHEDULES

from .page import PAGE, render


@pytest.mark.skipif(not SPLIT_SCHEDULES, reason="before torch 2.13 there are fewer schedules to combine")
def test_the_page_is_what_is_generated():
    assert PAGE.read_text() == render(), "write it again: .venv/bin/python -m tests.composition.page"
