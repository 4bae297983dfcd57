"""The random sequence that decides the order of data, apart from everything else that a rank draws."""

from __future__ import annotations

import random

import numpy as np
import torch

from halfmesh.engine.samplers import OwnRandomness, ShardedSampler


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_it_goes_on_where_it_was_left():
    mine = OwnRandomness(5)
    drawn = []
    for _ in range(3):
        with mine:
            drawn.append(draw())
        draw()
    other = OwnRandomness(5)
    with other:
        assert [draw() for _ in range(3)] == drawn
    assert len(set(drawn)) == 3


def test_what_is_drawn_outside_is_not_disturbed():
    seed_all(1)
    expected = [draw() for _ in range(3)]
    seed_all(1)
    got = []
    for _ in range(3):
        got.append(draw())
        with OwnRandomness(7):
            draw()
    assert got == expected


class RandomForever(torch.utils.data.Sampler):
    def __iter__(self):
        while True:
            yield int(torch.randint(1000, ()))


def test_an_endless_sampler_is_drawn_as_it_is_needed():
    shards = [iter(ShardedSampler(RandomForever(), rank, 2, 3, pad=True)) for rank in range(2)]
    drawn = []
    for _ in range(5):
        for shard in shards:
            torch.manual_seed(0)  # what else a rank draws must not matter
            drawn.append(next(shard))
    generator = torch.Generator().manual_seed(3)
    assert drawn == [int(torch.randint(1000, (), generator=generator)) for _ in range(10)]
