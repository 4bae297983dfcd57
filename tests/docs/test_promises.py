"""docs/promises.md: each row names tests that prove it. Tests that any other page names exist, too."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from halfmesh.compat import composition_table
from tests.support.pages import DOCS, ROOT, find_rows, read_page

PAGE = read_page("promises.md")
SECTIONS: dict[str, str] = dict(re.findall(r"^## (From .*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
ROWS = [row for text in SECTIONS.values() for row in find_rows(text, "what")]
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"]


@cache
def find_tests(path: str) -> frozenset[str]:
    """The names of the test functions in a file that pytest collects."""
    if not (ROOT / path).is_file():
        return frozenset()
    body = ast.parse((ROOT / path).read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def test_all_three_documents_are_there():
    assert list(SECTIONS) == ["From Colossal-AI", "From SageMaker", "From PyTorch's guide"]
    assert len(ROWS) == PAGE.count("\n| ") - len(SECTIONS)
    assert len(ROWS) > 40


def test_every_row_names_its_tests_and_nothing_else():
    for what, _, proven, page in ROWS:
        assert re.fullmatch(r"`tests/[\w/]+\.py::\w+`(, `tests/[\w/]+\.py::\w+`)*", proven), what
        assert re.search(r"\]\([\w./-]+\.md\)", page), what


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tests_that_a_page_names_exist(page):
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    assert [f"{path}::{name}" for path, name in named if name not in find_tests(path)] == []
    files = re.findall(r"`(tests/[\w/.]+)`", page.read_text())
    assert [path for path in files if not (ROOT / path).exists()] == []


def test_what_is_lifted_is_a_cell_that_trains():
    table = composition_table()
    lifted = {row[0] for row in ROWS if row[1].startswith("lifted")}
    assert {"fp16 does not go with ZeRO", "pipelines take the naive mode only"} <= lifted
    for mode in ("torch fp16", "naive fp16"):
        assert {table[mode][column] for column in ("pipeline", "zero1", "fsdp")} == {"yes"}
    assert {table["apex fp16"][column] for column in ("tensor", "pipeline")} == {"refused"}
