"""Which schedules there are, what they need, and how long a rank waits in them."""

from __future__ import annotations

import pytest

from halfmesh.parallel.pipeline.schedules import GPIPE, INTERLEAVED, ONE_F_ONE_B
from halfmesh.parallel.registries import SCHEDULES


def test_registered():
    assert set(SCHEDULES.names()) == {"gpipe", "1f1b", "interleaved"}
    assert SCHEDULES.get("gpipe") is GPIPE
    assert SCHEDULES.get("1f1b") is ONE_F_ONE_B
    assert SCHEDULES.get("interleaved") is INTERLEAVED


@pytest.mark.parametrize(
    ("schedule", "size", "chunks", "microbatches", "problems"),
    [
        ("gpipe", 4, 1, 1, {}),
        ("gpipe", 2, 1, None, {}),
        ("1f1b", 4, 1, 4, {}),
        ("1f1b", 4, 1, 7, {}),
        ("1f1b", 4, 1, None, {}),
        ("interleaved", 2, 2, 6, {}),
        ("interleaved", 2, 3, None, {}),
        (
            "1f1b",
            4,
            1,
            3,
            {
                "microbatches": "3 is fewer than the 4 stages, which schedule='1f1b' has to fill; use 4 or more, or "
                "schedule='gpipe'"
            },
        ),
        ("1f1b", 2, 2, 4, {"chunks": "2 chunks per rank need schedule='interleaved'; schedule='1f1b' has one"}),
        ("gpipe", 2, 2, 4, {"chunks": "2 chunks per rank need schedule='interleaved'; schedule='gpipe' has one"}),
        (
            "interleaved",
            4,
            2,
            6,
            {"microbatches": "6 is not a multiple of the 4 stages, which schedule='interleaved' needs; use 4 or 8"},
        ),
        (
            "interleaved",
            4,
            1,
            3,
            {
                "microbatches": "3 is not a multiple of the 4 stages, which schedule='interleaved' needs; use 4",
                "chunks": "1 chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'",
            },
        ),
    ],
)
def test_problems(schedule, size, chunks, microbatches, problems):
    assert dict(SCHEDULES.get(schedule).find_problems(size, chunks, microbatches)) == problems


def waiting(size: int, chunks: int, microbatches: int) -> float:
    """The part of a step in which rank 0 waits: the first microbatch goes through the other ranks, and comes back."""
    busy = chunks * microbatches
    return (size - 1) / (busy + size - 1)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 32])
def test_bubble(size, microbatches):
    for schedule in (GPIPE, ONE_F_ONE_B):
        assert schedule.bubble(size, 1, microbatches) == waiting(size, 1, microbatches)
    for chunks in (2, 3):
        assert INTERLEAVED.bubble(size, chunks, microbatches) == waiting(size, chunks, microbatches)


def test_bubble_of_known_cases():
    assert GPIPE.bubble(4, 1, 4) == pytest.approx(3 / 7)
    assert ONE_F_ONE_B.bubble(2, 1, 8) == pytest.approx(1 / 9)
    assert INTERLEAVED.bubble(4, 2, 8) == pytest.approx(3 / 19)
    assert GPIPE.bubble(1, 1, 3) == 0
