"""What docs/verify.md shows is what is printed; and a plan of docs/tensor-parallel.md is proven."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.pages import check, shown_commands

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """The folder of the snippets, from which ranks import, too."""
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def without_figures(text):
    """Without seconds and shares of what is allowed."""
    return re.sub(r"[\d.]+ s\)|by [\d.e+-]+|[\d.e-]+ of what", "", text)


def test_the_page_about_verify(run, importable):
    run("verify.md", files=("my_model.py", "config.py"))
    ((command, expected),) = shown_commands("verify.md")
    assert without_figures(check(command)) == without_figures(expected)


def test_a_plan_is_proven(run, importable):
    run("tensor-parallel.md", files=("config.py", "my_block.py"))
    assert "equal" in check("$ halfmesh verify config.py --model my_block:build --world-size 2")
