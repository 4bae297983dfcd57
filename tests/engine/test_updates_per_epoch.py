"""The number of updates in an epoch, before `initialize`: that of an epoch which is trained."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import halfmesh
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import make_data, sgd, train
from tests.support.ranks import rank_device, run_ranks

DATA = list(zip(*make_data(27), strict=True))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def counted(rank, world_size, layout):
    """What was said before, what the scheduler was told, and the updates of an epoch."""
    found = []
    for accumulated in ({"gradient_accumulation": 2}, {"global_batch_size": 24}):
        config = halfmesh.load_config({"parallel": LAYOUTS[layout][1], **accumulated})
        launch = halfmesh.Launch(config, rank_device(), rank, world_size, rank)
        loaders = [DataLoader(DATA, 4, shuffle=True), DataLoader(DATA, 4, drop_last=True)]
        if "gradient_accumulation" in accumulated:
            loaders.append(DataLoader(DATA, 2, sampler=DistributedSampler(DATA, launch.dp_size, rank % launch.dp_size)))
        for loader in loaders:
            told = []

            def scheduler(optimizer, updates_per_epoch, told=told):
                told.append(updates_per_epoch)
                return halfmesh.LinearWarmupLR(optimizer, warmup_steps=1, total_steps=2 * updates_per_epoch)

            updates = launch.updates_per_epoch(loader)
            given = Net(norm=torch.nn.LayerNorm), sgd, torch.nn.functional.cross_entropy, loader, launch
            with halfmesh.initialize(*given, lr_scheduler=scheduler) as engine:
                train(engine)
                found.append((updates, *told, engine.global_step))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_it_is_that_of_an_epoch(layout):
    for found in run_ranks(counted, 2, layout):
        assert all(numbers[0] > 0 and numbers == numbers[:1] * 3 for numbers in found), found


def test_a_value_that_the_user_bound_is_kept_and_what_has_no_length():
    """The value also without a dataloader, whose updates would be counted."""

    def make(optimizer, updates_per_epoch):
        return torch.optim.lr_scheduler.StepLR(optimizer, updates_per_epoch)

    bound = functools.partial(make, updates_per_epoch=100)
    with halfmesh.initialize(torch.nn.Linear(2, 2), sgd, config={}, lr_scheduler=bound, device="cpu") as engine:
        assert engine.lr_scheduler.step_size == 100
    launch = halfmesh.Launch(halfmesh.load_config({}), torch.device("cpu"), 0, 1, 0)
    for given, kind in ((DataLoader(Stream(), 4), "Stream"), (DATA, "list")):
        with pytest.raises(InputError, match=rf"updates per epoch is unknown: {kind} is no torch DataLoader, or a"):
            launch.updates_per_epoch(given)
