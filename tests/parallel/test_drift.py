"""The first thing that differs is found, the same on all ranks, and ranks are sorted by what they have."""

from __future__ import annotations

import torch

from halfmesh.parallel.drift import Common, Drift, describe, find_drift
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def found(rank, world_size):
    ones = torch.ones(1000)
    return [
        find_drift(mine, CPU)
        for mine in (
            [Common("a", torch.ones(2)), Common("b", 3)],
            [Common("a", torch.ones(2)), Common("b", rank == 1, order=1), Common("c", rank, order=0)],
            [Common("a", rank // 2)],
            [Common("a", rank, among=rank), Common("b", rank // 2, among=rank // 2)],
            [Common("a", rank % 2, among=rank // 2)],
            [Common(f"only rank {rank}", rank), *([Common("a", ones[:1] * rank)] if rank > 0 else [])],
            [Common(f"thing {number}", rank) for number in range(9)],
            [Common("a", (rank, "x" * 1000)), Common("b", rank == 3)],
            [Common("a", rank == 0)],
        )
    ]


def test_what_differs():
    results = run_ranks(found, 4)
    assert all(result == results[0] for result in results)
    alike, first, halves, parts, among, missing, many, long, odd = results[0]
    assert alike is None
    assert first == Drift("c", [[0], [1], [2], [3]], [f"{rank} instead of 0" for rank in (1, 2, 3)], ["b"])
    assert halves == Drift("a", [[0, 1], [2, 3]], ["1 instead of 0"], [])
    assert parts is None
    assert among is not None
    assert among.alike == [[0], [1]], "those of one part only"
    assert missing is not None
    assert missing.alike == [[1], [2], [3]]
    assert missing.apart[0] == "differs by 1 at most, in 1 of 1 elements, first at [0]: 2.0 instead of 1.0"
    assert many.also == [f"thing {number}" for number in range(1, 9)]
    assert all(len(text) < 300 for text in long.apart)
    assert long.also == ["b"]
    assert odd == Drift("a", [[1, 2, 3], [0]], ["True instead of False"], []), "the first rank is the odd one"


def test_what_is_said():
    names = [f"rank {rank}" for rank in range(4)]
    drift = Drift("x", [[0, 2], [1], [3]], ["differs by 1", "differs by 2"], [f"thing {number}" for number in range(7)])
    assert describe(drift, names).splitlines() == [
        "  - rank 0, rank 2: equal, taken as the reference",
        "  - rank 1: differs by 1",
        "  - rank 3: differs by 2",
        "  - different, too: thing 0, thing 1, thing 2, thing 3, thing 4 and 2 more",
    ]
