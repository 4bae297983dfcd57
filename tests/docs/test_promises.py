"""docs/promises.md is made from the marks on tests. Tests that any page names exist."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from docs_tools import promises
from halfmesh.compat import composition_table
from tests.support.pages import DOCS, ROOT

PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"]
MARK = "\n@pytest.mark.promise({})\ndef test_it(): ...\n"


@cache
def find_tests(path: str) -> frozenset[str]:
    """The names of the test functions in a file that pytest collects."""
    if not (ROOT / path).is_file():
        return frozenset()
    body = ast.parse((ROOT / path).read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def test_the_page_is_what_the_marks_say():
    assert promises.PAGE.read_text() == promises.render(), "make promises"
    found = promises.read_promises()
    assert {promise.of for promise in found} == set(promises.SOURCES)
    assert len(found) > 40
    assert [promise.what for promise in found if not (DOCS / promise.page).is_file()] == []


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        (['"a"'], "no test has the whole mark of 'a'"),
        (['"a", "b", of="PyTorch"'], "no test has the whole mark of 'a'"),
        (['"a", "b", of="PyTorch", page="loop.md"'] * 2, "test_1.py::test_it and .*test_0.py::test_it both have"),
    ],
)
def test_an_incomplete_mark_is_an_error(tmp_path, marks, message):
    for number, mark in enumerate(marks):
        (tmp_path / f"test_{number}.py").write_text(MARK.format(mark))
    with pytest.raises(ValueError, match=message):
        promises.read_promises(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tests_that_a_page_names_exist(page):
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    assert [f"{path}::{name}" for path, name in named if name not in find_tests(path)] == []
    files = re.findall(r"`(tests/[\w/.]+)`", page.read_text())
    assert [path for path in files if not (ROOT / path).exists()] == []


def test_what_is_lifted_is_a_cell_that_trains():
    table = composition_table()
    lifted = {promise.what for promise in promises.read_promises() if promise.here.startswith("lifted")}
    assert {"fp16 does not go with ZeRO", "pipelines take the naive mode only"} <= lifted
    for mode in ("torch fp16", "naive fp16"):
        assert {table[mode][column] for column in ("pipeline", "zero1", "fsdp")} == {"yes"}
    assert {table["apex fp16"][column] for column in ("tensor", "pipeline")} == {"rejected"}
