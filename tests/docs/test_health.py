"""docs/health.md: its scripts run, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_readme import find_python

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "health.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
MESSAGE, REPORT = (text for language, text in FENCED if not language)


def words(text):
    """Without the digits that depend on how a machine rounds, and where lines are broken."""
    return re.sub(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?%?", "#", " ".join(text.split()))


@pytest.mark.parametrize(("script", "shown"), [("overflow.py", MESSAGE), ("report.py", REPORT)])
def test_what_is_printed(script, shown, capsys):
    names = {}
    exec(find_python(PAGE, script), names)
    printed = capsys.readouterr().out
    assert words(printed) == words(shown)
    assert max(map(len, shown.splitlines())) <= 120
    if script == "overflow.py":
        assert names["layer"] == "1.scores"


def test_its_columns_are_those_of_the_table():
    header = next(line for line in REPORT.splitlines() if line.startswith("module"))
    table = PAGE[PAGE.index("| column |") :].partition("\n\n")[0].splitlines()[2:]
    first_cells = [row.replace("\\|", "!").split("|")[1].replace("!", "|").strip() for row in table]
    columns = [column for cell in first_cells for column in cell.split(", ")]
    assert columns == re.split(r"  +", header.strip())[1:]
