"""Digests tell tensors apart by their bits, and differences are described right."""

from __future__ import annotations

import math

import pytest
import torch

from halfmesh.parallel import digests
from halfmesh.parallel.digests import describe_difference, digest

NAN = math.nan


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.zeros(0), torch.zeros(0, 2), False),
        (torch.tensor(3), torch.tensor(4), False),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.eye(2, requires_grad=True), torch.eye(2), True),
        ((1, NAN), (1, NAN), True),
        ((1, 2.0), (1, 2), False),
        (None, 0, False),
    ],
)
def test_digests(one, other, same):
    assert (digest(one) == digest(other)) is same


def test_digests_of_large_integers_in_half_precision():
    assert digest(torch.tensor([2.0, 1.0], dtype=torch.bfloat16)) != digest(torch.tensor([2.0, 1.0078125]).bfloat16())


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            torch.zeros(2, 3),
            torch.tensor([[0, 0, 0.5], [0, -2.0, 0]]),
            "differs by 2 at most, in 2 of 6 elements, first at [0, 2]: 0.5 instead of 0.0",
        ),
        (torch.tensor(3), torch.tensor(5), "differs by 2 at most, in 1 of 1 elements, first at []: 5 instead of 3"),
        (torch.tensor([1.0, NAN]), torch.tensor([2.0, NAN]), "differs by 1 at most, in 1 of 2"),
        (torch.tensor([1.0, 5.0]), torch.tensor([NAN, 3.0]), "differs by nan at most, in 2 of 2"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "differs by 0 at most, in 1 of 1 elements"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "differs by 1 at most"),
        (torch.zeros(2), torch.zeros(3), "is float32 of shape [3], not float32 of shape [2]"),
        (torch.zeros(2), torch.zeros(2).half(), "is float16 of shape [2], not float32 of shape [2]"),
        (torch.tensor([1j]), torch.tensor([4 + 5j]), "differs by 5.65685 at most"),
    ],
)
def test_differences(ours, theirs, said):
    assert describe_difference(ours, theirs).startswith(said)


def test_large_tensors_are_compared_in_pieces(monkeypatch):
    monkeypatch.setattr(digests, "PIECE", 4)
    theirs = torch.zeros(10)
    theirs[[5, 9]] = torch.tensor([1.0, NAN])
    said = "differs by nan at most, in 2 of 10 elements, first at [5]: 1.0 instead of 0.0"
    assert describe_difference(torch.zeros(10), theirs) == said
    theirs[[8, 9]] = torch.tensor([-3.0, 2.0])
    assert describe_difference(torch.zeros(10), theirs).startswith("differs by 3 at most, in 3 of 10 elements")
