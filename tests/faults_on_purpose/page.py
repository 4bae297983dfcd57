"""Tries all faults, and writes benchmarks/results/faults.md: python -m tests.faults_on_purpose.page."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from halfmesh.utils.log import get_logger
from tests.support.ranks import end_teams

from .by_tests import running_tests
from .by_verify import judged, said, verifying
from .fault import ROOT, Fault
from .table import FAULTS, TESTS

PAGE = ROOT / "benchmarks" / "results" / "faults.md"


@dataclass(frozen=True)
class Row:
    """What one test, or verify in one layout, says of a fault.

    Attributes:
        by: the test or the layout.
        said: what verify says first.
        place: "right", "another" or "missed"; of a test "red".
    """

    fault: Fault
    by: str
    said: str
    cause: str
    place: str


def rates(places: Sequence[str]) -> tuple[float, float]:
    """Which share of the faults verify reports, and of which it names the right place first."""
    judged = [place for place in places if place != "red"]
    return 1 - judged.count("missed") / len(judged), judged.count("right") / len(judged)


def read() -> dict[tuple[str, str], str]:
    """What the page says of each fault: the place, by fault and test or layout."""
    found = re.findall(r"^\| (.*?) \|.*?\| `([^`]+)` \|.*\| (\w+) \|$", PAGE.read_text(), re.MULTILINE)
    return {(what, by): place for what, by, place in found}


def render(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the page."""
    tests = sum(row.place == "red" for row in rows)
    reported, right = rates([row.place for row in rows])
    users = sum(not fault.texts for fault in FAULTS)
    yield "# Faults on purpose"
    yield ""
    yield (
        f"{len(FAULTS)} faults, one at a time, tried by `python -m tests.faults_on_purpose.page`: "
        f"{len(FAULTS) - users} changes of halfmesh's source, {users} models, criteria or plans of a user. "
        f"{tests} times a test has to turn red, and does; it is green without the fault. "
        f"{len(rows) - tests} times [`halfmesh verify`](../../docs/verify.md) is asked, with layouts of 2 to 4 ranks "
        "on a CPU, whose ranks have the fault, and never the reference. "
        f"**{reported:.0%} are reported; {right:.0%} name the right place first**: the module, the parameter or the "
        "figure that is wrong; or halfmesh rejects it, and says what is wrong. Without the fault all is equal. "
        "`tests/faults_on_purpose/` compares each row."
    )
    yield ""
    yield "| what is wrong | where | what sees it | what is said first | likely cause | place |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        where = ", ".join(dict.fromkeys(f"`{text.file}`" for text in row.fault.texts)) or "a user's model"
        yield f"| {row.fault.what} | {where} | `{row.by}` | {short(row.said)} | {short(row.cause)} | {row.place} |"


def short(text: str) -> str:
    """The first sentence, without numbers that depend on the machine."""
    first = text.partition("\n")[0]
    first = re.sub(r",? by \S+ \(allowed \S+\)", "", first.partition("; ")[2] or first).replace("|", "/")
    return first if len(first) <= 160 else f"{first[:157]}..."


def by_tests() -> Iterator[Row]:
    """Each test that has to turn red, which is green without the fault."""
    with running_tests(test.partition("::")[0] for test in TESTS) as run:
        clean = run([], TESTS)
        assert not clean.red, clean.output
        assert clean.green
        for fault in FAULTS:
            for test in fault.tests:
                result = run(fault.texts, [test])
                yield Row(fault, test, "", "", "red" if result.red else "green")


def by_verify() -> Iterator[Row]:
    """Each layout in which verify has to see a fault."""
    with verifying() as verify:
        for fault in FAULTS:
            for place in fault.layouts:
                report = verify(fault, place, True)
                words = said(report) or f"nothing: {place.unseen}"
                cause = "" if report.first is None else report.first.cause
                yield Row(fault, str(place), words, cause, judged(place, report))


def main() -> None:
    """Run all, and write the page."""
    sys.path.insert(0, str(ROOT / "examples"))  # as pytest's settings do
    get_logger().setLevel(logging.WARNING)
    began = time.monotonic()
    try:
        with ThreadPoolExecutor() as pool:  # the tests run in another process
            tests = pool.submit(list, by_tests())
            rows = [*by_verify(), *tests.result()]
    finally:
        end_teams()
    for row in rows:
        if row.place not in ("right", "red"):
            print(f"{row.place}: {row.fault.what}: {row.by}: {row.said}")
    order = [(fault.what, str(by)) for fault in FAULTS for by in fault.seen]
    rows.sort(key=lambda row: order.index((row.fault.what, row.by)))
    PAGE.write_text("\n".join(render(rows)) + "\n")
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
