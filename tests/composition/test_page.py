"""docs/composition.md says what the table and the cells say."""

from __future__ import annotations

from .page import PAGE, render


def test_the_page_is_what_is_generated():
    assert PAGE.read_text() == render(), "write it anew: .venv/bin/python -m tests.composition.page"
