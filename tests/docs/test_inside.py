"""docs/inside.md, why.md and benchmarks.md: what they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from halfmesh.compat import composition_table
from tests.docs.test_readme import find_rows

ROOT = Path(__file__).resolve().parents[2]
INSIDE, WHY, BENCHMARKS = ((ROOT / "docs" / name).read_text() for name in ("inside.md", "why.md", "benchmarks.md"))


def test_files_that_are_named_exist():
    named = re.findall(r"`((?:halfmesh|tests|benchmarks)/[\w/.]+)(?:::\w+)?`", INSIDE + WHY + BENCHMARKS)
    assert len(named) > 60
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_tests_that_are_named_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", WHY)
    assert len(named) > 45
    missing = []
    for path, name in named:
        functions = {
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        missing += [f"{path}::{name}"] * (name not in functions)
    assert missing == []


def test_each_trap_has_a_test():
    tables = [section for section in WHY.split("\n## ") if "| mode | trap |" in section]
    assert len(tables) == 6
    for table in tables:
        for row in find_rows(table, "mode"):
            assert row[3].startswith("`tests/"), row


def test_each_cell_has_a_trap():
    table = composition_table()
    rows = {row[0]: row[1:] for row in find_rows(WHY, "| tensor")}
    assert list(rows) == list(table)
    for name, cells in rows.items():
        verdicts = list(table[name].values())
        assert [cell.startswith("refused") for cell in cells] == [verdict == "refused" for verdict in verdicts], name


def test_commands_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", BENCHMARKS))
    assert named <= targets
    assert {"bench", "soak"} <= named
