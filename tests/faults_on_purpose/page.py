"""Tries all faults, and writes benchmarks/results/faults.md: python -m tests.faults_on_purpose.page."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence

from halfmesh.utils.log import get_logger
from tests.support.ranks import end_teams

from .by_verify import judged, said, verifying
from .fault import ROOT
from .table import FAULTS

PAGE = ROOT / "benchmarks" / "results" / "faults.md"


def rates(places: Sequence[str]) -> tuple[float, float]:
    """Which share of the faults verify reports, and of which it names the right place first."""
    return 1 - places.count("missed") / len(places), places.count("right") / len(places)


def read() -> dict[tuple[str, str], str]:
    """What the page says of each fault: the place, by fault and layout."""
    found = re.findall(r"^\| (.*?) \|.*?\| `([^`]+)` \|.*\| (\w+) \|$", PAGE.read_text(), re.MULTILINE)
    return {(what, layout): place for what, layout, place in found}


def render(rows: Sequence[str], places: Sequence[str]) -> str:
    """The page."""
    reported, right = rates(places)
    users = sum(not fault.texts for fault in FAULTS)
    text = (
        f"{len(FAULTS)} faults, one at a time, tried by `python -m tests.faults_on_purpose.page`: "
        f"{len(FAULTS) - users} changes of halfmesh's source, {users} models, criteria or plans of a user. "
        f"[`halfmesh verify`](../../docs/verify.md) is asked {len(rows)} times, with layouts of 2 to 4 ranks "
        "on a CPU, whose ranks have the fault, and never the reference. "
        f"**{reported:.0%} are reported; {right:.0%} name the right place first**: the module, the parameter or the "
        "figure that is wrong; or halfmesh rejects it, and says what is wrong. Without the fault all is equal. "
        "`tests/faults_on_purpose/` compares each row."
    )
    head = [
        "| what is wrong | where | layout | what is said first | likely cause | place |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(["# Faults on purpose", "", text, "", *head, *rows]) + "\n"


def short(text: str) -> str:
    """The first sentence, without numbers that depend on the machine."""
    first = text.partition("\n")[0]
    first = re.sub(r",? by \S+ \(allowed \S+\)", "", first.partition("; ")[2] or first).replace("|", "/")
    return first if len(first) <= 160 else f"{first[:157]}..."


def try_all() -> Iterator[tuple[str, str]]:
    """Of each layout in which verify has to see a fault: the line of the page, and the place."""
    with verifying() as verify:
        for fault in FAULTS:
            where = ", ".join(dict.fromkeys(f"`{text.file}`" for text in fault.texts)) or "a user's model"
            for layout in fault.layouts:
                report = verify(fault, layout, True)
                words, place = said(report) or f"nothing: {layout.unseen}", judged(layout, report)
                cause = "" if report.first is None else report.first.cause
                if place != "right":
                    print(f"{place}: {fault.what}: {layout}: {words}")
                yield f"| {fault.what} | {where} | `{layout}` | {short(words)} | {short(cause)} | {place} |", place


def main() -> None:
    """Try all, and write the page."""
    sys.path.insert(0, str(ROOT / "examples"))  # as pytest's settings do
    get_logger().setLevel(logging.WARNING)
    began = time.monotonic()
    try:
        rows, places = zip(*try_all(), strict=True)
    finally:
        end_teams()
    PAGE.write_text(render(rows, places))
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
