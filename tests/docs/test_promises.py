"""docs/promises.md: each row names tests, which exist and run; and pages, which exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.test_readme import find_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text()
SECTIONS: dict[str, str] = dict(re.findall(r"^## (From .*?)\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE))
ROWS = [(title, *row) for title, text in SECTIONS.items() for row in find_rows(text, "what")]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def find_tests(path: str) -> frozenset[str]:
    """The names of the test functions in a file that pytest collects."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_all_three_documents_are_there():
    assert list(SECTIONS) == ["From Colossal-AI", "From SageMaker", "From PyTorch's guide"]
    assert len(ROWS) == PAGE.count("\n| ") - len(SECTIONS)
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:40])
def test_a_row_is_proven(row):
    _, what, here, proven, page = row
    assert what
    assert here
    named = NAMED.findall(proven)
    assert named, f"no test proves {what!r}"
    assert ", ".join(f"`{path}::{name}`" for path, name in named) == proven, "nothing but tests stands there"
    for path, name in named:
        assert (ROOT / path).is_file(), f"{what!r}: there is no {path}"
        assert name in find_tests(path), f"{what!r}: {path} has no {name}"
    (link,) = re.findall(r"\]\(([\w./-]+\.md)\)", page)
    assert (ROOT / "docs" / link).is_file()


def test_what_is_lifted_is_a_cell_that_trains():
    from halfmesh.compat import composition_table

    table = composition_table()
    lifted = {row[1] for row in ROWS if row[2].startswith("lifted")}
    assert {"fp16 does not go with ZeRO", "pipelines take the naive mode only"} <= lifted
    for mode in ("torch fp16", "naive fp16"):
        assert {table[mode][column] for column in ("pipeline", "zero1", "fsdp")} == {"yes"}
    assert {table["apex fp16"][column] for column in ("tensor", "pipeline")} == {"refused"}
