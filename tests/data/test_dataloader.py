"""The engine's dataloader in one process: devices, batch structures, the last batch, epochs."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import halfmesh
from halfmesh.engine.dataloader import EngineDataLoader
from halfmesh.engine.samplers import set_epoch, shard_loader
from halfmesh.errors import InputError
from tests.support.models import MLP, make_data, make_engine, make_loader, sgd

Pair = namedtuple("Pair", ["image", "label"])


class Structured(Dataset):
    def __init__(self, item) -> None:
        self.item = item

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int):
        return self.item


class Empty(IterableDataset):
    def __iter__(self):
        return iter(())


class Transfers(EngineDataLoader):
    """A loader to the meta device, to see which tensors are moved."""

    def __init__(self, loader) -> None:
        super().__init__(loader, torch.device("meta"))


@pytest.mark.parametrize(
    "item",
    [
        {"image": torch.ones(2), "extra": {"mask": torch.ones(2), "name": "a"}},
        (torch.ones(2), (torch.ones(2), [torch.ones(2), 3])),
        Pair(torch.ones(2), torch.tensor(1)),
    ],
    ids=["dicts", "nested tuples", "named tuples"],
)
def test_batches_of_any_structure_are_moved(item):
    batch = next(iter(Transfers(DataLoader(Structured(item), 2))))
    tensors = []
    halfmesh.tree.map_tensors(lambda t: tensors.append(t) or t, batch)
    assert tensors
    assert all(t.is_meta for t in tensors)
    if isinstance(item, Pair):
        assert type(batch) is Pair
    if isinstance(item, dict):
        assert batch["extra"]["name"] == ["a", "a"]


def test_at_end_is_true_on_the_last_batch_only():
    loader = EngineDataLoader(make_loader(20, 8), torch.device("cpu"))
    assert [loader.at_end for _ in loader] == [False, False, True]
    assert not loader.at_end
    for _ in loader:
        if loader.at_end:
            break
    assert not loader.at_end
    assert len(loader) == 3


class Reader(IterableDataset):
    """Gives one buffer again and again, as readers of large files do; the second number says what should be in it."""

    def __iter__(self):
        buffer = torch.empty(3)
        for number in range(5):
            yield buffer.fill_(number), torch.tensor(number)


class Joined:
    """A collate_fn with one buffer for all batches."""

    def __init__(self) -> None:
        self.buffer = torch.empty(3)

    def __call__(self, samples):
        return self.buffer.fill_(samples[0]), torch.tensor(samples[0])


class Wrong(Sampler):
    """A sampler that gives another number of samples than its length says."""

    def __init__(self, gives: int, says: int) -> None:
        self.gives, self.says = gives, says

    def __iter__(self):
        return iter(range(self.gives))

    def __len__(self) -> int:
        return self.says


class Queue(IterableDataset):
    """What was read is gone."""

    def __init__(self, length: int) -> None:
        self.left = list(range(length))

    def __iter__(self):
        while self.left:
            yield self.left.pop(0)


@pytest.mark.parametrize("needs_end", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Reader(), None),
        lambda: DataLoader(range(5), sampler=Wrong(5, 5), collate_fn=Joined()),
        lambda: shard_loader(DataLoader(Reader(), None), 0, 2, 7, pad=True),
    ],
    ids=["whole batches", "collate_fn", "strided"],
)
def test_a_buffer_that_is_used_again(make, needs_end):
    """Inputs and labels stay together, also where the end has to be known before it comes."""
    loader = EngineDataLoader(make(), torch.device("cpu"), needs_end=needs_end)
    seen = [(buffer.tolist(), number.item(), loader.at_end) for buffer, number in loader]
    assert len(seen) in (3, 5)
    assert all(values == [number] * 3 for values, number, _ in seen)
    assert [at_end for *_, at_end in seen][:-1] == [False] * (len(seen) - 1)


@pytest.mark.parametrize("needs_end", [False, True])
def test_a_batch_is_fetched_when_it_is_asked_for(needs_end):
    """So that a dataset or a sampler may look at what training did with the batch before. The end is known all the same
    where the length is sure."""
    data = make_loader(16).dataset
    read = []

    class Noted(Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, index):
            read.append(index)
            return data[index]

    loader = EngineDataLoader(DataLoader(Noted(), 4), torch.device("cpu"), needs_end=needs_end)
    assert [(len(read), loader.at_end) for _ in loader] == [(4, False), (8, False), (12, False), (16, True)]


def test_a_stream_that_is_left_loses_nothing():
    loader = EngineDataLoader(DataLoader(Queue(12)), torch.device("cpu"))
    seen = []
    for _ in range(4):
        for number, batch in enumerate(loader):
            seen.append(batch.item())
            if number == 2:
                break
    assert seen == list(range(12))


@pytest.mark.parametrize(("workers", "needs_end"), [(0, False), (0, True), (1, False)])
def test_the_batch_before_a_failure_is_handed_out(workers, needs_end):
    class Broken(Queue):
        def __iter__(self):
            yield from super().__iter__()
            raise ValueError("broken")

    loader = EngineDataLoader(DataLoader(Broken(3), num_workers=workers), torch.device("cpu"), needs_end=needs_end)
    batches = iter(loader)
    assert [next(batches).item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="broken"):
        next(batches)
    assert not loader.at_end


class Counted(Queue):
    def __len__(self) -> int:
        return 17


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Queue(5)),
        lambda: DataLoader(Counted(5)),
        lambda: DataLoader(range(9), sampler=Wrong(5, 9)),
        lambda: DataLoader(range(9), sampler=Wrong(5, 3)),
        lambda: DataLoader(range(9), batch_sampler=torch.utils.data.BatchSampler(Wrong(5, 9), 1, False)),
        lambda: DataLoader(range(9), sampler=range(5)),
        lambda: DataLoader(range(5)),
        lambda: DataLoader(range(5), num_workers=1),
        lambda: shard_loader(DataLoader(range(9), sampler=Wrong(10, 9)), 0, 2, 7, pad=True),
    ],
    ids=["no length", "stream", "more", "fewer", "batches", "range", "map", "workers", "sharded"],
)
def test_at_end_is_exact_where_training_depends_on_it(make):
    """Whatever the length says."""
    loader = EngineDataLoader(make(), torch.device("cpu"), needs_end=True)
    assert [loader.at_end for _ in loader] == [False] * 4 + [True]


@pytest.mark.parametrize("kind", ["stream", "sampler", "sure"])
def test_the_last_cycle_is_stepped_whatever_the_length_says(kind):
    data = TensorDataset(*make_data(10))

    class Samples(Counted):
        def __iter__(self):
            return iter([data[index] for index in range(10)])

    loader = {
        "stream": lambda: DataLoader(Samples(0), 2),
        "sampler": lambda: DataLoader(data, 2, sampler=Wrong(10, 17)),
        "sure": lambda: DataLoader(data, 2),
    }[kind]()
    engine = make_engine({"gradient_accumulation": 2}, loader=loader)
    updates = []
    for _ in range(2):
        for x, y in engine.dataloader:
            engine.backward(engine.criterion(engine(x), y))
            updates.append(engine.step() is not None)
    assert updates == [False, True, False, True, True] * 2


def test_at_end_after_two_loops_over_the_same_loader():
    loader = EngineDataLoader(make_loader(8, 8), torch.device("cpu"))
    assert len(list(zip(loader, loader, strict=False))) == 1
    assert not loader.at_end


def test_epochs_count_up_and_can_be_set():
    class Sampler(torch.utils.data.SequentialSampler):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs += (epoch,)

    data = make_loader().dataset
    sampler = Sampler(data)
    ended = []
    loader = EngineDataLoader(DataLoader(data, 8, sampler=sampler), torch.device("cpu"), lambda: ended.append(1))
    assert loader.epoch == -1
    list(loader)
    list(loader)
    loader.set_epoch(7)
    next(iter(loader))
    assert sampler.epochs == (0, 1, 7)
    assert loader.epoch == 7
    assert ended == [1, 1], "an epoch that was left early has not ended"
    set_epoch(object(), 1)  # nothing to tell


def test_one_process_keeps_the_users_loader():
    loader = make_loader(shuffle=True)
    assert make_engine(loader=loader).dataloader.loader is loader


def test_an_empty_stream():
    engine = halfmesh.initialize(MLP(), sgd, None, DataLoader(Empty(), 4), {}, eval_dataloader=DataLoader(Empty(), 4))
    with pytest.raises(InputError, match="epoch 0: the dataloader gave no batch on this rank; give it more samples"):
        list(engine.dataloader)
    assert list(engine.eval_dataloader) == []
    assert engine.eval_dataloader


def test_get_dataloader():
    data = make_loader(16).dataset
    orders = [
        [y.tolist() for _, y in halfmesh.get_dataloader(data, batch_size=4, shuffle=True, seed=s)] for s in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert len(halfmesh.get_dataloader(data, batch_size=5, drop_last=True)) == 3
    assert halfmesh.get_dataloader(Empty(), batch_size=4).batch_size == 4
    with pytest.raises(InputError, match="add_sampler=False would let every data rank see the same samples"):
        halfmesh.get_dataloader(data, add_sampler=False)
