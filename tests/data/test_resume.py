"""Where an interrupted epoch goes on: with the batches that were not trained on, as they would have come."""

import copy
import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader

import halfmesh
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import FEATURES
from tests.support.ranks import here, rank_device, run_ranks

from .loaders import FORK, LOADERS, SAMPLES, Noisy, Numbers, Permuted, plain, seed_all


class Stateful(DataLoader):
    """A loader that knows its place, as torchdata's StatefulDataLoader: it goes on by itself."""

    given = 0

    def __iter__(self):
        batches = super().__iter__()
        for _ in range(self.given):
            next(batches)
        return self._counted(batches)

    def _counted(self, batches):
        for batch in batches:
            self.given += 1
            yield batch
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


STATEFUL = {
    "stateful": lambda data, batch: Stateful(Permuted(), batch),
    "stateful, fetched ahead": lambda data, batch: Stateful(range(SAMPLES), batch, shuffle=True, num_workers=1, **FORK),
}
LEFT_OUT = ("no length", "numpy's generator", "workers that stay")  # their order is not known before, or in no state
ALL = {
    **{kind: make for kind, make in LOADERS.items() if kind not in LEFT_OUT},
    "stream": lambda data, batch: DataLoader(Permuted(), batch),  # what draws in each step draws between them, too
    "single samples of a stream": lambda data, batch: DataLoader(Permuted(), None),
    **STATEFUL,
}


def engine_of(kind, layout="one", lr_scheduler=None, **config):
    loader = ALL[kind](Numbers() if "workers" in kind else Noisy(), 3 if kind == "in order" else 4)
    optimizer = lambda params: optim.SGD(params, lr=0.1)  # noqa: E731
    options = {"lr_scheduler": lr_scheduler, "device": rank_device()}
    return halfmesh.initialize(Net(), optimizer, None, loader, {"parallel": LAYOUTS[layout][1], **config}, **options)


def train_on(engine):
    """Training draws random numbers, too."""
    torch.rand(3), random.random(), np.random.rand()
    engine.backward(engine(here(torch.zeros(2, FEATURES))).sum())
    engine.step()


def batches_of(engine, count, state_at=0, behind=0):
    """The next batches, over the ends of epochs; and the state when `state_at` of them were trained on, `behind` the
    batch that was handed out last."""
    seen, state = [], None
    while True:
        for batch in engine.dataloader:
            seen.append(plain(batch))
            if behind == 0 or len(seen) <= state_at:
                train_on(engine)
            if len(seen) == state_at + behind:
                state = copy.deepcopy(engine.state_dict())
            if len(seen) == count:
                return seen, state


def find_differences(kind, layout="one", places=(1, 3, 5), **config):
    """Places of the first two epochs where a run does not go on as it would have, also from a batch that was handed out
    and not trained on: what was drawn after it was handed out is then drawn again."""
    wrong = []
    for place, behind in itertools.product(places, (0, 1)):
        seed_all(0)
        expected, state = batches_of(engine_of(kind, layout, **config), 8, place, behind)
        torch.manual_seed(9)
        again = engine_of(kind, layout, **config)
        again.load_state_dict(state)
        count = 1 if behind else 8 - place
        if batches_of(again, count)[0] != expected[place : place + count]:
            wrong.append((place, behind))
    return wrong


CASES = [(kind, 1) for kind in ALL if kind not in STATEFUL] + [("shuffled", 2), ("stream", 2)]


@pytest.mark.parametrize(("kind", "accumulation"), CASES)
def test_it_goes_on_as_it_would_have(kind, accumulation):
    """Bit by bit, noise included. With accumulation streams are fetched ahead."""
    places = (2,) if "worker" in kind or accumulation == 2 else (1, 5)
    assert find_differences(kind, places=places, gradient_accumulation=accumulation) == []


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_loader_with_a_state_of_its_own_is_asked_for_it(kind):
    """For the batch that is trained on next, however many were fetched. It is of no use in another layout."""
    _, state = batches_of(engine_of(kind), 6, 3)
    assert state["dataloader"]["loader"] == {"given": 3}
    assert find_differences(kind, places=(1, 3, 4, 5)) == []
    engine = engine_of(kind)
    of_another_rank = state["dataloader"] | {"loader": {"given": 0}}
    assert engine.dataloader.load_state_dict(of_another_rank, own=False) is None
    assert len(list(engine.dataloader)) == 1


def over_ranks(rank, world_size):
    cells = [(kind, layout) for layout in ("dp2", "tp2") for kind in ("shuffled", "pairs", "stream")]
    return {cell: find_differences(*cell, places=(1, 3)) for cell in cells}


@pytest.mark.distributed
def test_it_goes_on_over_ranks_as_it_would_have():
    """Data ranks share one order; ranks of a tensor group share their batches."""
    for found in run_ranks(over_ranks, 2):
        assert {cell: places for cell, places in found.items() if places} == {}


def test_what_is_skipped_is_not_read():
    _, state = batches_of(engine_of("shuffled"), 3, 2)
    engine = engine_of("shuffled")
    engine.load_state_dict(state)
    assert len(list(engine.dataloader)) == 2
    assert len(engine.dataloader.dataset.read) == 8
    assert len(list(engine.dataloader)) == 4, "only the rest of one epoch"


def test_an_epoch_that_has_no_batch_left_ends():
    """Saved in the last batch of an epoch: the scheduler is advanced at its end, once."""
    options = {"lr_scheduler": partial(optim.lr_scheduler.StepLR, step_size=1), "lr_interval": "epoch"}
    engine, other = engine_of("in order", **options), engine_of("in order", **options)
    for number, _ in enumerate(engine.dataloader):
        train_on(engine)
        if number == 5:
            state = copy.deepcopy(engine.state_dict())
    assert engine.lr_scheduler.last_epoch == 1
    other.load_state_dict(state)
    assert (other.lr_scheduler.last_epoch, other.dataloader.next_epoch) == (0, 0)
    assert list(other.dataloader) == []
    assert (other.lr_scheduler.last_epoch, other.dataloader.next_epoch) == (1, 1)
