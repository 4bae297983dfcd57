"""Each sample is seen by one data rank, once an epoch, whatever the loader."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from halfmesh.distributed.rank_process import RankError
from tests.support.models import make_data, make_engine, said, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed


class Noise(Dataset):
    """A random number for each sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def shuffled(kind: str, items: list[int]) -> list[int]:
    if kind == "python":
        random.shuffle(items)
    elif kind == "numpy":
        np.random.shuffle(items)
    elif kind == "torch":
        items = [items[i] for i in torch.randperm(len(items)).tolist()]
    elif kind == "by rank":
        items = items[dist.get_rank() :: dist.get_world_size()]
    return items


class Stream(IterableDataset):
    def __init__(self, kind: str = "in order", count: int = 16) -> None:
        self.kind, self.count = kind, count

    def __iter__(self):
        return iter(shuffled(self.kind, list(range(self.count))))


class Reader(IterableDataset):
    """Gives one buffer again and again."""

    def __iter__(self):
        buffer = torch.empty(())
        for number in range(8):
            yield buffer.fill_(number)


class Batches:
    """A batch sampler of the user's own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self):
        return iter(torch.tensor(shuffled(self.kind, list(range(16)))).view(4, 4).tolist())

    def __len__(self) -> int:
        return 4


class Endless(Sampler):
    """In turn, or random, from a generator which ranks do not have in common."""

    def __init__(self, is_random: bool) -> None:
        self.random = np.random.default_rng() if is_random else None

    def __iter__(self):
        while True:
            yield from range(8) if self.random is None else [int(self.random.integers(2**40))]


class OwnGenerator(Sampler):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(16).tolist())

    def __len__(self) -> int:
        return 16


def looked_into():
    """Its workers are there before it is sharded."""
    loader = DataLoader(range(16), 4, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    next(iter(loader))
    return loader


IN_ORDER = {
    "in order": (lambda: DataLoader(range(16), 4), [[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]),
    "looked into": (looked_into, [[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]),
    "ragged": (lambda: DataLoader(range(11), 4), [[0, 2, 4, 6], [8, 10]], [[1, 3, 5, 7], [9, 0]]),
    "drop last": (lambda: DataLoader(range(11), 4, drop_last=True), [[0, 2, 4, 6]], [[1, 3, 5, 7]]),
    "batch sampler": (
        lambda: DataLoader(range(8), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7]]),
        [[0, 1, 2], [4, 5, 6, 7]],
        [[3], [0, 1, 2]],
    ),
    "plain batch sampler": (
        lambda: DataLoader(range(8), batch_sampler=BatchSampler(range(8), 2, False)),
        [[0, 2], [4, 6]],
        [[1, 3], [5, 7]],
    ),
    "no batches": (lambda: DataLoader(range(4), batch_size=None), [0, 2], [1, 3]),
    "stream": (
        lambda: DataLoader(Stream(count=20), 4),
        [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]],
        [[4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]],
    ),
    "one buffer": (lambda: DataLoader(Reader(), None), [0, 2, 4, 6], [1, 3, 5, 7]),
    "endless": (
        lambda: DataLoader(range(8), 2, sampler=Endless(False)),
        [[0, 2], [4, 6]] * 2,
        [[1, 3], [5, 7]] * 2,
    ),
}
SHUFFLED = {
    "shuffled": lambda: DataLoader(range(16), 4, shuffle=True),
    "own generator": lambda: DataLoader(range(16), 4, shuffle=True, generator=torch.Generator()),
    "weighted": lambda: DataLoader(range(16), 4, sampler=WeightedRandomSampler([1.0] * 16, 16, replacement=False)),
    "distributed": lambda: DataLoader(range(16), 4, sampler=DistributedSampler(range(16), 2, dist.get_rank())),
    "batches by python": lambda: DataLoader(range(16), batch_sampler=Batches("python")),
    "batches by numpy": lambda: DataLoader(range(16), batch_sampler=Batches("numpy")),
    "stream by torch": lambda: DataLoader(Stream("torch"), 4),
    "stream by numpy": lambda: DataLoader(Stream("numpy"), 4),
}
REFUSED = {
    "shards itself": (lambda: DataLoader(Stream("by rank"), 2), "the Stream gives different data on each rank"),
    "another rank's": (
        lambda: DataLoader(range(16), 4, sampler=DistributedSampler(range(16), 4, 1)),
        "num_replicas=4, rank=1, but this is data rank 0 of 2",
    ),
    "empty": (lambda: DataLoader(range(3), 4, drop_last=True), "the dataloader gave no batch on this rank"),
    "own order": (lambda: DataLoader(range(16), 4, sampler=OwnGenerator()), "the OwnGenerator gives different data on"),
    "own endless order": (lambda: DataLoader(range(2**40), 4, sampler=Endless(True)), "the Endless gives different"),
}


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def first_batches(loader: Any) -> list[Any]:
    return [plain(batch) for batch, _ in zip(loader, range(4), strict=False)]


def shards(rank: int, world_size: int) -> dict[str, Any]:
    """What this rank sees of each loader. The ranks draw other numbers from here on."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    seen: dict[str, Any] = {}
    for name, (make, *_) in IN_ORDER.items():
        with make_engine(loader=make()) as engine:
            seen[name] = first_batches(engine.dataloader)
    for name, make in SHUFFLED.items():
        with make_engine(loader=make()) as engine:
            seen[name] = [first_batches(engine.dataloader) for _ in range(2)]
    for name in ("ragged", "stream"):
        with make_engine(eval_dataloader=IN_ORDER[name][0]()) as engine:
            seen[f"{name}, evaluated"] = first_batches(engine.eval_dataloader)
    with make_engine(loader=DataLoader(Noise(), 2, num_workers=1, multiprocessing_context="fork")) as engine:
        seen["noise"] = [x for _ in range(2) for batch in engine.dataloader for x in batch.tolist()]
    for name, (make, _) in REFUSED.items():
        seen[name] = said(_iterate, make())
    return seen


def _iterate(loader: DataLoader) -> None:
    with make_engine(loader=loader) as engine:
        next(iter(engine.dataloader))


def flat(epoch: list) -> list[int]:
    return [i for batch in epoch for i in (batch if isinstance(batch, list) else [batch])]


@pytest.mark.promise(
    "DistributedSampler, `join`",
    "any loader is sharded once; uneven ends do not hang",
    of="SageMaker",
    page="loop.md",
)
def test_every_kind_of_loader_is_sharded_once():
    first, second = run_ranks(shards, 2, timeout=120)
    for name, (_, *expected) in IN_ORDER.items():
        assert [first[name], second[name]] == expected, name
    for name in SHUFFLED:
        for mine, theirs in zip(first[name], second[name], strict=True):
            assert sorted(flat(mine) + flat(theirs)) == list(range(16)), name
            assert [len(b) for b in mine] == [len(b) for b in theirs] == [4, 4]
        assert first[name][0] != first[name][1], "a new order in each epoch"
    # Training pads, so that both ranks have as many batches; evaluation counts nothing twice.
    assert second["ragged, evaluated"] == [[1, 3, 5, 7], [9]]
    assert second["stream, evaluated"] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert len({*first["noise"], *second["noise"]}) == 8, "workers of other ranks and epochs draw other numbers"
    for name, (_, message) in REFUSED.items():
        assert message in first[name], name


def workers_after_a_foreign_state(rank: int, world_size: int) -> list[float]:
    engine = make_engine(loader=DataLoader(Noise(), 2, num_workers=1, multiprocessing_context="fork"))
    states: list = [engine.state_dict()]
    dist.broadcast_object_list(states, src=0)
    engine.load_state_dict(states[0])
    return [x for batch in engine.dataloader for x in batch.tolist()]


def test_workers_differ_after_a_state_of_another_rank():
    first, second = run_ranks(workers_after_a_foreign_state, 2)
    assert not set(first) & set(second)


def uneven(rank: int, world_size: int) -> list[int]:
    """7 samples over 2 ranks in batches of 2."""
    engine = make_engine(loader=DataLoader(TensorDataset(*make_data(7)), 2))
    return [len(x) for x, _ in engine.dataloader] + [len(train(engine))]


@pytest.mark.promise("DistributedSampler, `join`")
def test_uneven_tails_never_hang():
    """They are padded, so that both ranks have 2 batches and nobody waits."""
    assert run_ranks(uneven, 2) == [[2, 2, 2]] * 2


class OwnIter(DataLoader):
    """Iterates in its own way: over what torch's gives, once or for ever, or past it."""

    def __init__(self, dataset, way, workers):
        super().__init__(dataset, 2, num_workers=workers, persistent_workers=workers > 0)
        self.way = way

    def __iter__(self):
        if self.way == "past":
            yield from DataLoader(self.dataset, 2)
        elif self.way == "once":
            batches = super().__iter__()
            for _ in range(len(self)):
                x, y = next(batches)
                yield x + 1, y
        while self.way == "endless":
            yield from super().__iter__()


def with_own_iter(rank: int, world_size: int, way: str, workers: int = 0) -> list[list[float]]:
    loader = OwnIter(TensorDataset(torch.arange(8.0), torch.zeros(8)), way, workers)
    engine = make_engine(loader=loader)
    return [[value for x, _ in engine.dataloader for value in x.tolist()] for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_with_its_own_iter_is_sharded(workers):
    for first, second in zip(*run_ranks(with_own_iter, 2, "once", workers), strict=True):
        assert sorted([*first, *second]) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("past", "OwnIter overrides __iter__ without using its sampler"),
        ("endless", "goes through its samples a second time in one epoch"),
    ],
)
def test_a_loader_whose_own_iter_cannot_be_sharded_is_refused(way, message):
    with pytest.raises(RankError, match=message):
        run_ranks(with_own_iter, 2, way)
