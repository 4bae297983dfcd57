"""The number of updates in an epoch, before `initialize`: that of an epoch which is trained."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

import halfmesh
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import make_data, sgd, train
from tests.support.ranks import rank_device, run_ranks

DATA = list(zip(*make_data(27), strict=True))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(DATA)


class CountedStream(Stream):
    def __len__(self) -> int:
        return len(DATA)


LOADERS = {
    "ragged": lambda size: DataLoader(DATA, 4, shuffle=True),
    "drop last": lambda size: DataLoader(DATA, 4, drop_last=True),
    "batches": lambda size: DataLoader(DATA, batch_sampler=[[i] for i in range(9)]),
    "own sampler": lambda size: DataLoader(DATA, batch_sampler=BatchSampler(range(14), 2, drop_last=False)),
    "distributed": lambda size: (
        DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, rank_device_index() % size))
        if size > 1
        else DataLoader(DATA, 2)
    ),
    "stream": lambda size: DataLoader(CountedStream(), 3),
}


def rank_device_index() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def counted(rank: int, world_size: int, layout: str) -> list[tuple[Any, ...]]:
    """What was said before, what the scheduler was told, and the updates of an epoch."""
    found = []
    for accumulated in ({"gradient_accumulation": 2}, {"gradient_accumulation": 5}, {"global_batch_size": 24}):
        for kind, make in LOADERS.items():
            if "global_batch_size" in accumulated and kind not in ("ragged", "drop last"):
                continue
            config = halfmesh.load_config({"parallel": LAYOUTS[layout][1], **accumulated})
            launch = halfmesh.Launch(config, rank_device(), rank, world_size, rank)
            loader, told = make(launch.dp_size), []

            def scheduler(optimizer: Any, updates_per_epoch: int, told: list[int] = told) -> Any:
                told.append(updates_per_epoch)
                return halfmesh.LinearWarmupLR(optimizer, warmup_steps=1, total_steps=2 * updates_per_epoch)

            updates = launch.updates_per_epoch(loader)
            given = Net(norm=torch.nn.LayerNorm), sgd, torch.nn.functional.cross_entropy, loader, launch
            with halfmesh.initialize(*given, lr_scheduler=scheduler) as engine:
                train(engine)
                found.append((kind, updates, *told, engine.global_step))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["one", "dp2", "fsdp", "tp2"])
def test_it_is_that_of_an_epoch(layout):
    ranks = LAYOUTS[layout][0]
    for found in run_ranks(counted, ranks, layout, init=ranks > 1):
        assert len(found) == 14
        for kind, *numbers in found:
            assert numbers == numbers[:1] * 3, kind
            assert numbers[0] > 0


def test_a_value_that_the_user_bound_is_kept():
    """Also without a dataloader, whose updates would be counted."""

    def make(optimizer: Any, updates_per_epoch: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, updates_per_epoch)

    bound = functools.partial(make, updates_per_epoch=100)
    for loader in (None, DataLoader(DATA, 4)):
        model, criterion = Net(norm=torch.nn.LayerNorm), torch.nn.functional.cross_entropy
        with halfmesh.initialize(model, sgd, criterion, loader, {}, lr_scheduler=bound, device="cpu") as engine:
            assert engine.lr_scheduler.step_size == 100


def test_what_has_no_length():
    launch = halfmesh.Launch(halfmesh.load_config({}), torch.device("cpu"), 0, 1, 0)
    with pytest.raises(InputError, match="not known: Stream, or its sampler, has no length"):
        launch.updates_per_epoch(DataLoader(Stream(), 4))
    with pytest.raises(InputError, match="but a list was given"):
        launch.updates_per_epoch(DATA)  # type: ignore[arg-type]
