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


def loaders(rank: int, size: int) -> dict[str, Any]:
    return {
        "ragged": DataLoader(DATA, 4, shuffle=True),
        "drop last": DataLoader(DATA, 4, drop_last=True),
        "batches": DataLoader(DATA, batch_sampler=[[i] for i in range(9)]),
        "own sampler": DataLoader(DATA, batch_sampler=BatchSampler(range(14), 2, drop_last=False)),
        "distributed": DataLoader(DATA, 2, sampler=DistributedSampler(DATA, size, rank % size)),
        "stream": DataLoader(CountedStream(), 3),
    }


def counted(rank: int, world_size: int, layout: str) -> list[tuple[Any, ...]]:
    """What was said before, what the scheduler was told, and the updates of an epoch."""
    found = []
    for accumulated in ({"gradient_accumulation": 2}, {"gradient_accumulation": 5}, {"global_batch_size": 24}):
        config = halfmesh.load_config({"parallel": LAYOUTS[layout][1], **accumulated})
        launch = halfmesh.Launch(config, rank_device(), rank, world_size, rank)
        for kind, loader in loaders(rank, launch.dp_size).items():
            if "global_batch_size" in accumulated and kind not in ("ragged", "drop last"):
                continue
            told: list[int] = []

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
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_it_is_that_of_an_epoch(layout):
    for found in run_ranks(counted, 2, layout):
        assert len(found) == 14
        for kind, *numbers in found:
            assert numbers == numbers[:1] * 3, kind
            assert numbers[0] > 0


def test_a_value_that_the_user_bound_is_kept():
    """Also without a dataloader, whose updates would be counted."""

    def make(optimizer: Any, updates_per_epoch: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, updates_per_epoch)

    bound = functools.partial(make, updates_per_epoch=100)
    with halfmesh.initialize(torch.nn.Linear(2, 2), sgd, config={}, lr_scheduler=bound, device="cpu") as engine:
        assert engine.lr_scheduler.step_size == 100


def test_what_has_no_length():
    launch = halfmesh.Launch(halfmesh.load_config({}), torch.device("cpu"), 0, 1, 0)
    with pytest.raises(InputError, match="unknown: Stream, or its sampler, has no length"):
        launch.updates_per_epoch(DataLoader(Stream(), 4))
    with pytest.raises(InputError, match="but got a list"):
        launch.updates_per_epoch(DATA)  # type: ignore[arg-type]
