"""Writes the table of docs/benchmarks.md from benchmarks/RESULTS.md: `python -m docs_tools.speed_table`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"

ROWS = ("halfmesh", "hand-written loop, fused=True", "accelerate", "Lightning Fabric")
BEGIN, END = "<!-- begin: python -m docs_tools.speed_table -->\n", "<!-- end -->"


def render(results: str) -> str:
    """The table: a row for each work that halfmesh and the hand-written loop took part in."""
    lines = ["| work | " + " | ".join(ROWS) + " |", "|---" * (len(ROWS) + 1) + "|"]
    for work, section in re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", results, re.DOTALL | re.MULTILINE):
        ratios = {name: _ratio(section, name) for name in ROWS}
        if ratios["halfmesh"] and ratios["hand-written loop, fused=True"]:
            lines.append(f"| {work} | " + " | ".join(ratio or "" for ratio in ratios.values()) + " |")
    return "\n".join(lines) + "\n"


def update(page: str, table: str) -> str:
    """`page` with `table` between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table + "\n" + END + rest.split(END, 1)[1]


def _ratio(section: str, name: str) -> str | None:
    found = re.search(rf"^\| {re.escape(name)} \| (\d[^|]*?) \|", section, re.MULTILINE)
    return found[1] if found else None


def main() -> None:
    """Write the page."""
    PAGE.write_text(update(PAGE.read_text(), render(RESULTS.read_text())))


if __name__ == "__main__":
    main()
