"""Each sample is seen by one data rank, once an epoch, whatever the loader; and what cannot be sharded is rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

from tests.support.models import make_data, make_engine, said, train
from tests.support.ranks import run_ranks

from .loaders import plain, seed_all

pytestmark = pytest.mark.distributed


class Stream(IterableDataset):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Reader(IterableDataset):
    """Gives one buffer again and again."""

    def __iter__(self):
        buffer = torch.empty(())
        for number in range(8):
            yield buffer.fill_(number)


class Endless(Sampler):
    """In turn, or random, from a generator which ranks do not have in common."""

    def __init__(self, is_random: bool) -> None:
        self.random = np.random.default_rng() if is_random else None

    def __iter__(self):
        while True:
            yield from range(8) if self.random is None else [int(self.random.integers(2**40))]


class LongEndless(Endless):
    """It has a length, but is not to be read so far ahead."""

    def __len__(self) -> int:
        return 10**10


class OwnGenerator(Sampler):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(16).tolist())

    def __len__(self) -> int:
        return 16


class OwnIter(DataLoader):
    """Iterates in its own way: over what torch's gives, once or for ever, or past it."""

    def __init__(self, way: str) -> None:
        super().__init__(TensorDataset(torch.arange(8)), 2)
        self.way = way

    def __iter__(self):
        if self.way == "past":
            yield from DataLoader(self.dataset, 2)
        elif self.way == "once":
            batches = super().__iter__()
            for _ in range(len(self)):
                (x,) = next(batches)
                yield x + 1
        while self.way == "endless":
            yield from super().__iter__()


SHARDS = {  # what each of two ranks gets
    "in order": (lambda: DataLoader(range(16), 4), [[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]),
    "ragged": (lambda: DataLoader(range(11), 4), [[0, 2, 4, 6], [8, 10]], [[1, 3, 5, 7], [9, 0]]),
    "drop last": (lambda: DataLoader(range(11), 4, drop_last=True), [[0, 2, 4, 6]], [[1, 3, 5, 7]]),
    "batch sampler": (
        lambda: DataLoader(range(8), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7]]),
        [[0, 1, 2], [4, 5, 6, 7]],
        [[3], [0, 1, 2]],
    ),
    "distributed": (
        lambda: DataLoader(range(8), 2, sampler=DistributedSampler(range(8), 2, dist.get_rank(), shuffle=False)),
        [[0, 2], [4, 6]],
        [[1, 3], [5, 7]],
    ),
    "no batches": (lambda: DataLoader(range(4), batch_size=None), [0, 2], [1, 3]),
    "stream": (
        lambda: DataLoader(Stream(range(20)), 4),
        [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]],
        [[4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]],
    ),
    "one buffer": (lambda: DataLoader(Reader(), None), [0, 2, 4, 6], [1, 3, 5, 7]),
    "endless": (lambda: DataLoader(range(8), 2, sampler=Endless(False)), [[0, 2], [4, 6]] * 2, [[1, 3], [5, 7]] * 2),
    "long": (lambda: DataLoader(range(8), 2, sampler=LongEndless(False)), [[0, 2], [4, 6]] * 2, [[1, 3], [5, 7]] * 2),
    "own iter": (lambda: OwnIter("once"), [[1, 3], [5, 7]], [[2, 4], [6, 8]]),
}
EVALUATED = {  # nothing is counted twice
    "ragged": ([[0, 2, 4, 6], [8, 10]], [[1, 3, 5, 7], [9]]),
    "stream": ([[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]], [[4, 5, 6, 7], [12, 13, 14, 15]]),
}
REJECTED = {
    "shards itself": (
        lambda: DataLoader(Stream(range(dist.get_rank(), 16, 2)), 2),
        "the Stream gives different data on each rank",
    ),
    "another rank's": (
        lambda: DataLoader(range(16), 4, sampler=DistributedSampler(range(16), 4, 1)),
        "the dataloader's DistributedSampler has num_replicas=4, rank=1, but this is data rank 0 of 2",
    ),
    "empty": (lambda: DataLoader(range(3), 4, drop_last=True), "the dataloader has no batch for this rank"),
    "own order": (lambda: DataLoader(range(16), 4, sampler=OwnGenerator()), "the OwnGenerator gives different data on"),
    "own endless order": (lambda: DataLoader(range(2**40), 4, sampler=Endless(True)), "the Endless gives different"),
    "past its sampler": (lambda: OwnIter("past"), "OwnIter overrides __iter__ without using its sampler"),
    "again and again": (lambda: OwnIter("endless"), "reads its samples twice in one epoch"),
}


def first_batches(loader: Any) -> list[Any]:
    return [plain(batch) for batch, _ in zip(loader, range(4), strict=False)]


def shards(rank: int, world_size: int) -> dict[str, Any]:
    """What this rank sees of each loader. The ranks draw other numbers from here on."""
    seed_all(rank)
    seen: dict[str, Any] = {}
    for name, (make, *_) in SHARDS.items():
        with make_engine(loader=make()) as engine:
            seen[name] = first_batches(engine.dataloader)
    for name in EVALUATED:
        with make_engine(eval_dataloader=SHARDS[name][0]()) as engine:
            seen[f"{name}, evaluated"] = first_batches(engine.eval_dataloader)
    with make_engine(loader=DataLoader(TensorDataset(*make_data(7)), 2)) as engine:
        seen["uneven"] = [len(x) for x, _ in engine.dataloader], len(train(engine))
    for name, (make, _) in REJECTED.items():
        seen[name] = said(_iterate, make())
    return seen


def _iterate(loader: DataLoader) -> None:
    with make_engine(loader=loader) as engine:
        list(engine.dataloader)


@pytest.mark.promise("DistributedSampler, `join`", "any loader is sharded once", of="SageMaker", page="loop.md")
def test_every_kind_of_loader_is_sharded_once():
    """Training pads, so that both ranks have as many batches and nobody waits."""
    results = run_ranks(shards, 2, timeout=120)
    for rank, found in enumerate(results):
        expected = {name: cells[1 + rank] for name, cells in SHARDS.items()}
        expected |= {f"{name}, evaluated": cells[rank] for name, cells in EVALUATED.items()}
        expected["uneven"] = ([2, 2], 2)
        assert {name: found[name] for name in expected} == expected
    for name, (_, message) in REJECTED.items():
        assert message in results[0][name], name
