"""Each sample is seen by one data rank, once an epoch, whatever the loader."""

from __future__ import annotations

import multiprocessing
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import (
    MLP,
    make_data,
    make_engine,
    sgd,
    train,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


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
    def __init__(self, kind: str = "in order") -> None:
        self.kind = kind

    def __iter__(self):
        return iter(torch.tensor(shuffled(self.kind, list(range(20)))))


class Shuffled:
    """A batch sampler of the user's own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self):
        return iter(torch.tensor(shuffled(self.kind, list(range(16)))).view(4, 4).tolist())

    def __len__(self) -> int:
        return 4


class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        while True:
            yield from range(8)


class Noise(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def shards(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def epochs(loader, count=1, **options):
        engine = halfmesh.initialize(MLP(), sgd, None, loader, {}, device="cpu", **options)
        result = [[b.tolist() for b in engine.dataloader] for _ in range(count)]
        length = len(engine.dataloader) if not isinstance(loader.dataset, IterableDataset) else None
        evaluated = [b.tolist() for b in engine.eval_dataloader] if options else None
        engine.close()
        return result, length, evaluated

    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    seen["in order"] = epochs(DataLoader(Numbers(16), 4))
    seen["shuffled"] = epochs(DataLoader(Numbers(16), 4, shuffle=True), 2)
    generator = torch.Generator().manual_seed(rank)
    seen["own generator"] = epochs(DataLoader(Numbers(16), 4, shuffle=True, generator=generator))
    seen["ragged"] = epochs(DataLoader(Numbers(11), 4), eval_dataloader=DataLoader(Numbers(11), 4))
    seen["drop last"] = epochs(DataLoader(Numbers(11), 4, drop_last=True))
    weights = torch.utils.data.WeightedRandomSampler([1.0] * 16, 16, replacement=False)
    seen["weighted sampler"] = epochs(DataLoader(Numbers(16), 4, sampler=weights))
    batches = [[0, 1, 2], [3], [4, 5, 6, 7]]
    seen["batch sampler"] = epochs(DataLoader(Numbers(8), batch_sampler=batches))
    plain = torch.utils.data.BatchSampler(range(8), 2, False)
    seen["plain batch sampler"] = epochs(DataLoader(Numbers(8), batch_sampler=plain))
    own = torch.utils.data.DistributedSampler(Numbers(16), world_size, rank, shuffle=True)
    seen["own distributed sampler"] = epochs(DataLoader(Numbers(16), 4, sampler=own), 2)
    seen["no batches"] = epochs(DataLoader(Numbers(4), batch_size=None))
    seen["iterable"] = epochs(DataLoader(Stream(), 4), eval_dataloader=DataLoader(Stream(), 4))
    multiprocessing.current_process().daemon = False  # so that it may have workers
    seen["workers"] = epochs(DataLoader(Noise(4), 2, num_workers=1), 2)
    for name, kind in {"python": "python", "numpy": "numpy", "torch": "torch"}.items():
        seen[f"shuffled by {name}"] = epochs(DataLoader(Numbers(16), batch_sampler=Shuffled(kind)), 2)
        seen[f"stream by {name}"] = epochs(DataLoader(Stream(kind), 2), 2)
    endless = halfmesh.initialize(MLP(), sgd, None, DataLoader(Numbers(8), 2, sampler=Endless()), {}, device="cpu")
    seen["endless"] = [batch.tolist() for batch, _ in zip(endless.dataloader, range(3), strict=False)]
    endless.close()
    try:
        epochs(DataLoader(Stream("by rank"), 2))
    except InputError as error:
        seen["shards itself"] = str(error)
    try:
        wrong = torch.utils.data.DistributedSampler(Numbers(16), 4, 1)
        epochs(DataLoader(Numbers(16), 4, sampler=wrong))
    except InputError as error:
        seen["refused"] = str(error)
    try:
        epochs(DataLoader(Numbers(3), 4, drop_last=True))
    except InputError as error:
        seen["empty"] = str(error)
    return seen


def test_every_kind_of_loader_is_sharded_once():
    first, second = run_ranks(shards, 2, timeout=120)

    def flat(epoch):
        return [i for batch in epoch for i in (batch if isinstance(batch, list) else [batch])]

    for kind in ("in order", "shuffled", "own generator", "weighted sampler", "own distributed sampler"):
        for mine, theirs in zip(first[kind][0], second[kind][0], strict=True):
            assert sorted(flat(mine) + flat(theirs)) == list(range(16)), kind
            assert [len(b) for b in mine] == [len(b) for b in theirs] == [4, 4]
        assert first[kind][1] == 2
    for kind in ("python", "numpy", "torch"):
        for mine, theirs in zip(first[f"shuffled by {kind}"][0], second[f"shuffled by {kind}"][0], strict=True):
            assert sorted(flat(mine) + flat(theirs)) == list(range(16)), kind
        for mine, theirs in zip(first[f"stream by {kind}"][0], second[f"stream by {kind}"][0], strict=True):
            assert sorted(flat(mine) + flat(theirs)) == list(range(20)), kind
        epoch, following = first[f"stream by {kind}"][0]
        assert epoch != following
    assert first["endless"] == [[0, 2], [4, 6], [0, 2]]
    assert "the Stream gives different data on each rank" in first["shards itself"]
    assert first["in order"][0] == [[[0, 2, 4, 6], [8, 10, 12, 14]]]
    for kind in ("shuffled", "own distributed sampler"):
        assert first[kind][0][0] != first[kind][0][1], "a new order in each epoch"
    # Training pads, so that both ranks have as many batches; evaluation counts nothing twice.
    assert first["ragged"][0] == [[[0, 2, 4, 6], [8, 10]]]
    assert second["ragged"][0] == [[[1, 3, 5, 7], [9, 0]]]
    assert first["ragged"][2] == [[0, 2, 4, 6], [8, 10]]
    assert second["ragged"][2] == [[1, 3, 5, 7], [9]]
    assert [len(b) for b in first["drop last"][0][0]] == [len(b) for b in second["drop last"][0][0]] == [4]
    assert first["batch sampler"][0] == [[[0, 1, 2], [4, 5, 6, 7]]]
    assert second["batch sampler"][0] == [[[3], [0, 1, 2]]]
    assert first["plain batch sampler"][0] == [[[0, 2], [4, 6]]]
    assert first["no batches"][0] == [[0, 2]]
    assert first["iterable"][0] == [[[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]]
    assert second["iterable"][0] == [[[4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]]]
    assert second["iterable"][2] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    noise = [*flat(first["workers"][0][0]), *flat(second["workers"][0][0]), *flat(first["workers"][0][1])]
    assert len(set(noise)) == 6, "workers of different ranks and epochs draw different numbers"
    assert "num_replicas=4, rank=1, but this is data rank 0 of 2" in first["refused"]
    assert "the dataloader gave no batch on this rank" in first["empty"]


def seeds(rank: int, world_size: int) -> list:
    orders = []
    for seed in (1, 1, 2):
        loader = DataLoader(Numbers(16), 4, shuffle=True)
        engine = halfmesh.initialize(MLP(), sgd, None, loader, {"seed": seed}, device="cpu")
        orders.append([b.tolist() for b in engine.dataloader])
        orders.append(torch.rand(1).item())
        engine.dataloader.set_epoch(5)
        orders.append([b.tolist() for b in engine.dataloader])
        engine.close()
    return orders


def test_seed_and_epoch_decide_the_order():
    first, second = run_ranks(seeds, 2)
    for orders in (first, second):
        assert orders[0:3] == orders[3:6]
        assert orders[0] != orders[6]
        assert orders[0] != orders[2]
        assert orders[1] != orders[7]
    assert first[1] != second[1], "dropout differs between data ranks"


def workers_after_a_foreign_state(rank: int, world_size: int) -> list[float]:
    multiprocessing.current_process().daemon = False
    engine = halfmesh.initialize(MLP(), sgd, None, DataLoader(Noise(4), 2, num_workers=1), {}, device="cpu")
    states: list = [engine.state_dict()]
    dist.broadcast_object_list(states, src=0)
    engine.load_state_dict(states[0])
    return [x for batch in engine.dataloader for x in batch.tolist()]


def test_workers_differ_after_a_state_of_another_rank():
    first, second = run_ranks(workers_after_a_foreign_state, 2)
    assert not set(first) & set(second)


def persistent_workers(rank: int, world_size: int) -> list[int]:
    multiprocessing.current_process().daemon = False
    loader = DataLoader(Numbers(16), 4, num_workers=1, persistent_workers=True)
    next(iter(loader))
    engine = halfmesh.initialize(MLP(), sgd, None, loader, {}, device="cpu")
    return [i for _ in range(2) for batch in engine.dataloader for i in batch.tolist()]


def test_a_loader_that_was_looked_into_before():
    first, second = run_ranks(persistent_workers, 2)
    assert first == [*range(0, 16, 2)] * 2
    assert second == [*range(1, 16, 2)] * 2


class EndlessOwnGenerator(torch.utils.data.Sampler):
    def __iter__(self):
        generator = np.random.default_rng()
        while True:
            yield int(generator.integers(2**40))  # two ranks do not draw the same by chance


class OwnGenerator(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(16).tolist())

    def __len__(self) -> int:
        return 16


class Circular(torch.utils.data.SequentialSampler):
    loader: Any = None


def order_differs(rank: int, world_size: int) -> tuple[list[str], int]:
    circular = Circular(Numbers(8))
    loader = DataLoader(Numbers(8), 2, sampler=circular)
    circular.loader, circular.inner = loader, circular
    with halfmesh.initialize(MLP(), sgd, None, loader, {}, device="cpu") as engine:
        count = len(list(engine.dataloader))
    messages = []
    for count_of, sampler in ((16, OwnGenerator()), (2**40, EndlessOwnGenerator())):
        loader = DataLoader(Numbers(count_of), 4, sampler=sampler)
        with halfmesh.initialize(MLP(), sgd, None, loader, {}, device="cpu") as engine:
            try:
                next(iter(engine.dataloader))
            except InputError as error:
                messages.append(str(error))
    return messages, count


def test_an_order_that_differs_between_ranks_is_refused_on_all():
    for messages, count in run_ranks(order_differs, 2):
        assert [m.split(" gives different data on each rank")[0] for m in messages] == [
            "the OwnGenerator",
            "the EndlessOwnGenerator",
        ]
        assert "or was iterated on some ranks only" in messages[0]
        assert count == 2


def uneven_loader_refused(rank: int, world_size: int) -> list[int]:
    """7 samples over 2 ranks in batches of 2: padded, so that both have 2 batches and nobody waits."""
    engine = make_engine(loader=DataLoader(TensorDataset(*make_data(7)), 2))
    return [len(x) for x, _ in engine.dataloader] + [len(train(engine))]


def test_uneven_tails_never_hang():
    assert run_ranks(uneven_loader_refused, 2) == [[2, 2, 2]] * 2
