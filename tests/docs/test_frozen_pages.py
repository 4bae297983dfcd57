"""Pages that are written by programs are what these write now: messages, public names, tables, the picture."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from docs_tools import error_page, picture, public_names, speed_table


def render_benchmarks():
    return speed_table.update(speed_table.PAGE.read_text(), speed_table.render(speed_table.RESULTS.read_text()))


GENERATED = {
    "docs_tools.error_page": (error_page.PAGE, error_page.render),
    "docs_tools.public_names": (public_names.FROZEN, public_names.render),
    "docs_tools.speed_table": (speed_table.PAGE, render_benchmarks),
    "docs_tools.picture": (picture.PATH, picture.render),
}


def find_difference(path: Path, expected: str, command: str) -> str:
    """What is to be read where the file at `path` is not `expected`; else nothing."""
    lines = difflib.unified_diff(
        path.read_text().splitlines(),
        expected.splitlines(),
        f"{path.name} (committed)",
        f"{path.name} (now)",
        "",
        "",
        1,
        "",
    )
    text = "\n".join(lines)
    return f"{text}\n\nIf that is what you want: python -m {command}" if text else ""


@pytest.mark.parametrize("module", GENERATED)
def test_it_is_what_would_be_written_now(module):
    path, render = GENERATED[module]
    difference = find_difference(path, render(), module)
    assert not difference, f"{path} is not what the source says any more:\n{difference}"


def test_a_difference_reads_well(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("a\nb(x)\nc\n")
    assert find_difference(path, "a\nb(x, y)\nc\n", "docs_tools.public_names").splitlines() == [
        *("--- names.txt (committed)", "+++ names.txt (now)", "@@ -1,3 +1,3 @@"),
        *(" a", "-b(x)", "+b(x, y)", " c", ""),
        "If that is what you want: python -m docs_tools.public_names",
    ]
    assert find_difference(path, "a\nb(x)\nc\n", "") == ""
