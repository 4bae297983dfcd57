"""Writes benchmarks/results/verify_faults.md: python -m tests.verify.faults.table."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from halfmesh.verify.report import VerifyReport
from tests.support.ranks import end_teams

from .corpus import FAULTS, Fault
from .runs import runs, said

PAGE = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "verify_faults.md"
PLACES = ("right", "another", "missed")
"""What a row may say of the place that is named first."""


class Row(NamedTuple):
    """What verify says of a fault.

    Attributes:
        fault: its name.
        place: one of `PLACES`.
    """

    fault: str
    place: str


def place_of(fault: Fault, report: VerifyReport) -> str:
    """Whether the place that is named first is right."""
    words = said(report)
    return "right" if fault.is_right(words) else "another" if words else "missed"


def rates(rows: Sequence[Row]) -> tuple[float, float]:
    """Which share of the faults is reported, and of which the right place is named first."""
    reported, right = (sum(row.place in places for row in rows) for places in (PLACES[:2], PLACES[:1]))
    return reported / len(rows), right / len(rows)


def read() -> list[Row]:
    """The rows of the page."""
    found = re.findall(r"^\| `([^`]+)` .*\| (\w+) \|$", PAGE.read_text(), re.MULTILINE)
    return [Row(name, place) for name, place in found]


def render(reports: Sequence[tuple[Fault, VerifyReport]]) -> Iterator[str]:
    """The lines of the page."""
    rows = [Row(fault.name, place_of(fault, report)) for fault, report in reports]
    reported, right = rates(rows)
    users = sum(fault.is_users for fault, _ in reports)
    yield "# What `halfmesh verify` says of faults"
    yield ""
    yield (
        f"`python -m tests.verify.faults.table` verifies layouts of 2 to 4 ranks on a CPU with {len(rows)} faults, one "
        f"at a time: {len(rows) - users} in the engine of ranks, never in the reference; {users} in a user's model, "
        f"criterion or plan. **{reported:.0%} are reported; {right:.0%} name the right place first**: the module, the "
        "parameter or the figure that is wrong; or halfmesh refuses it, and says what is wrong. "
        "`tests/verify/test_faults.py` compares each row."
    )
    yield ""
    yield "| fault | what is wrong | what is said first | likely cause | place |"
    yield "|---|---|---|---|---|"
    for (fault, report), row in zip(reports, rows, strict=True):
        cause = "" if report.first is None else report.first.cause
        words = _short(said(report)) or f"nothing: {fault.unseen}"
        cells = (f"`{row.fault}`", fault.why, words, _short(cause), row.place)
        yield f"| {' | '.join(cells)} |"


def _short(text: str) -> str:
    """The first sentence, without numbers that depend on the machine."""
    text = re.sub(
        r",? by \S+ \(allowed \S+\)", "", text.partition("\n")[0].partition("; ")[2] or text.partition("\n")[0]
    )
    text = text.replace("|", "/")
    return text if len(text) <= 160 else f"{text[:157]}..."


def main() -> None:
    """Run all, and write the page."""
    sys.path.insert(0, str(PAGE.parents[2] / "examples"))  # as pytest's settings do
    try:
        with runs() as each:
            reports = [(fault, each.report(fault)) for fault in FAULTS]
    finally:
        end_teams()
    PAGE.write_text("\n".join(render(reports)) + "\n")
    for fault, report in reports:
        if (place := place_of(fault, report)) != "right":
            print(f"{place}: {fault.name}: {said(report)}")


if __name__ == "__main__":
    main()
