"""Which rank is named as the reason, for every way in which ranks end."""

from __future__ import annotations

import pytest

from halfmesh.causes import find_cause
from halfmesh.end_log import End, Ends
from halfmesh.layout import Layout

R, LOST, LATE, KILLED, DONE = End.RUNNING, End.LOST, End.TIMED_OUT, End.KILLED, End.FINISHED
MESH = Layout(4, tensor=2)
BY_ITSELF = "ended without an error of its own (killed, out of memory?)"
EARLY = "ended without an error while others waited for it (left its loop early?)"
HANGS = "not waiting, so likely hanging (or slower than that): "


@pytest.mark.parametrize(
    ("ends", "text", "certain"),
    [
        ({0: R, 1: LATE, 3: End.FAILED, 2: KILLED}, "the first error was:\nboom", True),
        ({3: End.INTERRUPTED, 0: LOST, 1: KILLED}, "interrupted (Ctrl-C): rank 3 (dp 1, tp 1)", True),
        ({0: R, 2: LOST, 3: KILLED}, f"rank 3 (dp 1, tp 1) {BY_ITSELF}", True),
        ({0: R, 3: KILLED, 2: LATE}, f"rank 3 (dp 1, tp 1) {BY_ITSELF}", True),
        ({1: DONE, 0: R, 2: KILLED, 3: LOST}, f"rank 2 (dp 1, tp 0) {BY_ITSELF}", True),
        ({0: R, 1: DONE, 2: LOST, 3: LATE}, f"rank 1 (dp 0, tp 1) {EARLY}", True),
        ({3: R, 0: LATE, 2: LOST, 1: LATE}, f"{HANGS}rank 3 (dp 1, tp 1)", False),
        ({0: LATE, 2: LATE, 1: LATE, 3: KILLED}, f"{HANGS}rank 3 (dp 1, tp 1)", False),  # the launcher ended it
        ({0: LATE, 2: LATE, 1: LATE, 3: DONE}, f"{HANGS}rank 3 (dp 1, tp 1)", False),  # it had forgotten the others
        ({0: LATE, 2: LATE}, f"{HANGS}rank 1 (dp 0, tp 1), rank 3 (dp 1, tp 1)", False),
        (
            {2: LATE, 0: LOST, 1: LATE, 3: LATE},
            "all ranks do, so they wait in different collectives: each has to run the same ones, in the same order",
            True,
        ),
        (
            {1: R, 3: R, 2: LOST, 0: LOST},
            "not heard of, so likely the reason (killed, out of memory?): rank 1 (dp 0, tp 1), rank 3 (dp 1, tp 1)",
            False,
        ),
        (
            {2: LOST, 3: LOST, 0: LOST, 1: LOST},
            "no rank left an error of its own; the first to end was rank 2 (dp 1, tp 0)",
            True,
        ),
    ],
)
def test_the_reason(ends: dict[int, End], text: str, certain: bool) -> None:
    cause = find_cause(Ends(ends, "boom"), MESH)
    assert (cause.text, cause.certain) == (text, certain)


def test_who_is_known_to_wait_is_not_the_reason() -> None:
    """It began to wait later, and has time left."""
    ends = Ends({3: R, 1: R, 0: LATE, 2: LATE}, "")
    assert find_cause(ends, MESH).text == f"{HANGS}rank 1 (dp 0, tp 1), rank 3 (dp 1, tp 1)"
    assert find_cause(ends, MESH, {0, 1, 2}).text == f"{HANGS}rank 3 (dp 1, tp 1)"
    assert find_cause(ends, MESH, {0, 1, 2, 3}).text.startswith("all ranks do, so they wait in different collectives")


@pytest.mark.parametrize(
    ("end", "asks"), [(R, True), (DONE, True), (KILLED, False), (End.FAILED, False), (End.INTERRUPTED, False)]
)
def test_where_ranks_are_is_asked_where_it_tells_more(end: End, asks: bool) -> None:
    assert find_cause(Ends({3: end, 0: LATE, 1: LATE, 2: LATE}, ""), MESH).asks == asks
