"""How messages name a rank."""

from __future__ import annotations

import itertools

import pytest
import torch

from halfmesh.layout import Layout
from halfmesh.parallel.context import AXES


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(8), "rank 5"),
        (Layout(8, tensor=2), "rank 5 (dp 2, tp 1)"),
        (Layout(8, pipeline=2), "rank 5 (pp 1, dp 1)"),
        (Layout(8, pipeline=2, tensor=4), "rank 5 (pp 1, tp 1)"),
        (Layout(8, pipeline=2, tensor=2), "rank 5 (pp 1, dp 0, tp 1)"),
        (Layout(8, tensor=8), "rank 5 (tp 5)"),
        (Layout(8, tensor=3), "rank 5"),  # refused elsewhere
    ],
)
def test_axes_of_size_1_are_left_out(layout: Layout, name: str) -> None:
    assert layout.name(5) == name
    assert layout.has_places == ("(" in name)


def test_places_are_those_of_the_mesh() -> None:
    grid = torch.arange(12).view(3, 2, 2)
    for places in itertools.product(range(3), range(2), range(2)):
        rank = int(grid[places])
        words = ", ".join(f"{axis} {place}" for axis, place in zip(AXES, places, strict=True))
        assert Layout(12, pipeline=3, tensor=2).name(rank) == f"rank {rank} ({words})"


def test_several() -> None:
    assert Layout(4, tensor=2).names([3, 1]) == "rank 1 (dp 0, tp 1), rank 3 (dp 1, tp 1)"
