"""Writes the table of docs/models.md from the cells: python -m tests.models_table.page."""

from __future__ import annotations

from pathlib import Path

from .cells import LAYOUTS, Cell
from .zoo import SUBJECTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN = "<!-- Written by `python -m tests.models_table.page`; a test compares the two. -->\n\n"
END = "\n<!-- end of what is written -->\n"


def render() -> str:
    """What stands between the two comments."""
    lines = [
        f"| model | {' | '.join(layout.words for layout in LAYOUTS.values())} |",
        "|---" * (len(LAYOUTS) + 1) + "|",
    ]
    for model in SUBJECTS:
        cells = [_say(Cell(model, layout)) for layout in LAYOUTS]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _say(cell: Cell) -> str:
    if cell.rejection is not None:
        return "**rejected**"
    cut = next(layout for layout in LAYOUTS if LAYOUTS[layout].pipeline > 1)  # said once, the others have the same
    points = SUBJECTS[cell.model].points if cell.layout == cut else ()
    return f"yes, cut at `{points[0]}`" if points else "yes"


def main() -> None:
    """Write the page again."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + render() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
