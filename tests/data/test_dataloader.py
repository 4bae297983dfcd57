"""The engine's dataloader in one process: devices, batch structures, the last batch, epochs, waiting for data."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import MLP, make_engine, make_loader, sgd


def dataloader(loader, accumulation=1):
    """With accumulation the end of an epoch has to be known before it comes."""
    return make_engine({"gradient_accumulation": accumulation}, loader=loader).dataloader


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


class Counted(Queue):
    def __len__(self) -> int:
        return 17


def test_inputs_and_labels_of_a_buffer_that_is_used_again_stay_together():
    """As a collate_fn or a reader of large files may have. Under accumulation this one is fetched ahead."""
    buffer = torch.empty(3)

    def collate(samples):
        return buffer.fill_(samples[0]), torch.tensor(samples[0])

    given = DataLoader(range(5), sampler=Wrong(5, 5), collate_fn=collate)
    assert [(x.tolist(), y.item()) for x, y in dataloader(given, 2)] == [([n] * 3, n) for n in range(5)]


def test_a_batch_is_fetched_when_it_is_asked_for():
    """So that a dataset or a sampler may look at what training did with the batch before."""
    read = []

    class Noted(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            read.append(index)
            return index

    loader = dataloader(DataLoader(Noted(), 4), 2)
    assert [(len(read), loader.at_end) for _ in loader] == [(4, False), (8, False), (12, True)]
    assert not loader.at_end


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Queue(5)),
        lambda: DataLoader(Counted(5)),
        lambda: DataLoader(range(9), sampler=Wrong(5, 9)),
        lambda: DataLoader(range(5), num_workers=1),
    ],
    ids=["no length", "stream", "more", "workers"],
)
def test_the_last_cycle_is_stepped_whatever_the_length_says(make):
    engine = make_engine({"gradient_accumulation": 2}, loader=make())
    updates = []
    for _ in engine.dataloader:
        engine.backward(engine.model.last.bias.sum())
        updates.append(engine.step() is not None)
    assert updates == [False, True, False, True, True]


def test_epochs_count_up_and_can_be_set():
    class Sampler(SequentialSampler):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs += (epoch,)

    sampler = Sampler(range(8))
    loader = dataloader(DataLoader(range(8), 4, sampler=sampler))
    assert (loader.epoch, len(loader)) == (-1, 2)
    list(loader)
    loader.set_epoch(7)
    next(iter(loader))
    assert (sampler.epochs, loader.epoch) == ((0, 7), 7)


def test_an_empty_stream():
    engine = halfmesh.initialize(MLP(), sgd, None, DataLoader(Queue(0), 4), {}, eval_dataloader=DataLoader(Queue(0)))
    with pytest.raises(InputError, match="epoch 0: the dataloader has no batch for this rank; give it at"):
        list(engine.dataloader)
    assert list(engine.eval_dataloader) == []


@pytest.mark.promise(
    "`get_dataloader`, LinearWarmupLR, the loop", "the same names", of="Colossal-AI", page="../README.md"
)
def test_get_dataloader():
    def order(seed):
        return [y.tolist() for _, y in halfmesh.get_dataloader(data, batch_size=4, shuffle=True, seed=seed)]

    data = make_loader(16).dataset
    assert order(1) == order(1) != order(2)
    assert len(halfmesh.get_dataloader(data, batch_size=5, drop_last=True)) == 3
    assert halfmesh.get_dataloader(Queue(4), batch_size=4).batch_size == 4
    with pytest.raises(InputError, match="add_sampler=False would give every data rank the same samples"):
        halfmesh.get_dataloader(data, add_sampler=False)
