"""Pieces are dealt out to stages evenly; models of blocks; how long ranks wait."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from halfmesh import BlockPartition, InputError
from halfmesh.parallel.registries import SCHEDULES
from tests.support.pipeline_parts import check_pieces, stages_of


def row(*costs: int) -> nn.Sequential:
    """Modules with so many parameters."""
    return nn.Sequential(*(nn.Linear(1, cost, bias=False) if cost else nn.Tanh() for cost in costs))


def best(costs, count):
    """The smallest largest sum of a division into runs, by trying all."""
    return min(
        max(sum(costs[begin:end]) for begin, end in pairwise([0, *inner, len(costs)]))
        for inner in combinations(range(1, len(costs)), count - 1)
    )


def test_the_largest_stage_is_as_small_as_can_be():
    numbers = random.Random(0)
    for _ in range(30):
        costs = [numbers.choice([0, 1, 1, 2, 3, 7, 20]) for _ in range(numbers.randint(1, 9))]
        count = numbers.randint(1, len(costs))
        names, found, problems = stages_of(row(*costs), count)
        assert (len(names), problems) == (count, []), "no stage is empty"
        assert max(found) == best(costs, count), (costs, count)


# -- BlockPartition --------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Blocks that take a mask, which is computed with a module of its own; a head that may be missing."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.begin, self.scale, self.head = nn.Linear(4, 4), nn.Linear(4, 4), None
        self.position = nn.Parameter(torch.randn(4))
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(count))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, x = self.scale(x), self.begin(x) + self.position
        for block in self.body["blocks"]:
            x = x + block(x) * mask
        return x


MASKED = BlockPartition(
    layers=(Masked,),
    blocks="body.blocks",
    begin=lambda model, x: model.begin(x) + model.position,
    end=lambda model, x: x,
    end_uses=("head",),
    share=lambda model, x: model.scale(x),
    shared_uses=("scale",),
    block=lambda block, x, mask: x + block(x) * mask,
    find_problem=lambda model: None if len(model.body["blocks"]) else "it has no blocks",
)


def test_blocks_use_what_they_share():
    model, x = Masked(), torch.randn(2, 4)
    pieces = check_pieces(model, [x], partition=MASKED)
    assert [set(piece.uses) for piece in pieces] == [
        {"begin", "position"},
        *({f"body.blocks.{index}", "scale"} for index in range(3)),
        set(),
    ]


def test_models_that_a_block_partition_does_not_take():
    derived = type("Derived", (Masked,), {"forward": lambda self, x: x})
    assert MASKED.pieces_of(derived()) is None
    with pytest.raises(InputError, match=r"the model \(Masked\): it has no blocks"):
        MASKED.pieces_of(Masked(count=0))


@pytest.mark.parametrize(
    ("schedule", "size", "chunks", "microbatches", "waits"),
    [("gpipe", 4, 1, 4, 3 / 7), ("1f1b", 2, 1, 8, 1 / 9), ("interleaved", 4, 2, 8, 3 / 19)],
)
def test_the_part_of_a_step_in_which_a_rank_waits(schedule, size, chunks, microbatches, waits):
    assert SCHEDULES.get(schedule).bubble(size, chunks, microbatches) == pytest.approx(waits)
