"""The engine's dataloader in one process: devices, batch structures, the last batch, epochs."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from models import MLP, make_engine, make_loader, sgd
from torch.utils.data import DataLoader, Dataset, IterableDataset

import halfmesh
from halfmesh.engine.dataloader import EngineDataLoader
from halfmesh.engine.samplers import set_epoch
from halfmesh.errors import InputError

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
