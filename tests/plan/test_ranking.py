"""The order of choices, on made-up figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfmesh.plan.candidates import Candidate, Mesh
from halfmesh.plan.ranking import find_best, order, pick, why

MESH = Mesh(1, 8, 1, 8)
PLAIN = Candidate("naive-bf16", MESH, "zero1", 8)
GB = 10**9


def row(memory=40, bubble=0.0, within=10, across=0, **candidate):
    from halfmesh.plan.ranking import Row

    return Row(replace(PLAIN, **candidate), memory * GB, bubble, within * GB, across * GB, 80 * GB)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (row(70, mode="fp32"), row(79), "room: 10% of the memory left: 88% used, not 99% used"),
        (row(checkpoint="full"), row(mode="fp32"), "half precision: naive-bf16, not fp32"),
        (row(bubble=0.3), row(checkpoint="selective"), "less computed again: off, not selective"),
        (row(checkpoint="selective"), row(checkpoint="every=2"), "less computed again: selective, not every=2"),
        (row(across=100), row(bubble=0.03), "a smaller bubble: 0.0%, not 3.0%"),
        (row(within=100, bubble=0.02), row(across=1), "fewer bytes between nodes: 0 B, not 953.7 MiB"),
        (row(within=5, across=5), row(within=9, across=3), "fewer bytes in all: 9.3 GiB, not 11.2 GiB"),
        (row(within=10.9), row(cycle=2), "fewer passes through the model: 1, not 2"),
        (
            row(60, strategy="replicate"),
            row(20),
            f"a simpler layout: {replace(PLAIN, strategy='replicate')}, not {PLAIN}",
        ),
        (row(60), row(mode="torch-bf16"), "the mode that is first: naive-bf16, not torch-bf16"),
        (row(20), row(30), "less memory: 18.6 GiB, not 27.9 GiB"),
    ],
)
def test_the_first_of_two_and_why(first, second, reason):
    for rows in ([first, second], [second, first]):
        assert pick(rows) is first
    assert why(first, second, [first, second]) == reason


def test_each_layout_is_listed_once_with_its_best_batch():
    rows = [row(30, cycle=4), row(50, cycle=2), row(90, cycle=1), row(strategy="fsdp", within=30)]
    assert order(rows, 8) == [rows[1], rows[3]]
    assert order(rows, 1) == [rows[1]]


def test_what_no_other_is_better_than():
    rows = [row(40, within=10), row(40, within=20), row(30, within=20), row(30, within=20)]
    assert find_best(rows) == [True, False, True, True]


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (Mesh(1, 8, 1, 8), {"dp": 0.0, "tp": 0.0, "pp": 0.0}),
        (Mesh(1, 64, 1, 8), {"dp": 1 / 8, "tp": 0.0, "pp": 0.0}),
        (Mesh(1, 8, 8, 8), {"dp": 1.0, "tp": 0.0, "pp": 0.0}),
        (Mesh(1, 16, 4, 8), {"dp": 1 / 2, "tp": 0.0, "pp": 0.0}),
        (Mesh(4, 4, 2, 8), {"dp": 0.0, "tp": 0.0, "pp": 1.0}),
        (Mesh(2, 2, 2, 8), {"dp": 0.0, "tp": 0.0, "pp": 0.0}),
        (Mesh(8, 1, 1, 4), {"dp": 0.0, "tp": 0.0, "pp": 1.0}),
        (Mesh(1, 6, 1, 4), {"dp": 1 / 4, "tp": 0.0, "pp": 0.0}),
    ],
)
def test_what_leaves_a_node(mesh, expected):
    assert {axis: mesh.crossing(axis) for axis in expected} == expected
