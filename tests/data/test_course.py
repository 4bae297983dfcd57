"""Where an epoch is gone on with: the batches that were not trained on, as they would have come."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

import halfmesh
from halfmesh.engine.dataloader import EngineDataLoader
from halfmesh.engine.samplers import Share, shard_loader, share
from tests.support.models import MLP, make_engine

SAMPLES = 20


class Noisy(Dataset):
    """Samples with noise from each of the generators; it knows which were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.read.append(index)
        return index, torch.rand(()).item() + random.random() + float(np.random.rand())


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[int, float]]:
        for index in torch.randperm(SAMPLES).tolist():
            yield index, torch.rand(()).item()


class Pairs(Sampler):
    """A batch sampler of somebody's own."""

    def __iter__(self) -> Iterator[list[int]]:
        for index in torch.randperm(SAMPLES // 2).tolist():
            yield [2 * index, 2 * index + 1]

    def __len__(self) -> int:
        return SAMPLES // 2


def seeded():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "in order": lambda: DataLoader(Noisy(), 3),
    "with a generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=seeded()),
    "sampler with a generator": lambda: DataLoader(Noisy(), 4, sampler=RandomSampler(Noisy(), generator=seeded())),
    "weighted": lambda: DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "pairs": lambda: DataLoader(Noisy(), batch_sampler=Pairs()),
    "single samples": lambda: DataLoader(Noisy(), None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 4),
    "strided stream": lambda: shard_loader(DataLoader(Stream(), 2), 1, 2, 7, pad=True),
    "sharded": lambda: shard_loader(DataLoader(Noisy(), 2, shuffle=True), 1, 2, 7, pad=True),
    "sharded pairs": lambda: shard_loader(DataLoader(Noisy(), batch_sampler=Pairs()), 0, 2, 7, pad=True),
    "a list": lambda: [torch.tensor([float(n)]) for n in range(6)],
}


def plain(batch):
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in batch]


def batches_of(loader, count=None, state_at=None, behind=0):
    """The next batches, over the ends of epochs; and the state when `state_at` of them were trained on, `behind` the
    batch that was handed out last. Training draws random numbers, too."""
    seen, state = [], None
    while True:
        for batch in loader:
            seen.append(plain(batch))
            torch.rand(3), random.random(), np.random.rand()
            if behind == 0 or len(seen) <= (state_at or 0):
                loader.note_training()
            if state_at is not None and len(seen) == state_at + behind:
                state = copy.deepcopy(loader.state_dict()), random_numbers()
            if len(seen) == count:
                return seen, state


def random_numbers():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_numbers(state):
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


@pytest.mark.parametrize("needs_end", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("kind", LOADERS)
def test_it_goes_on_as_it_would_have(kind, seed, needs_end):
    """Bit by bit, noise included, from each place of the first two epochs, also from a batch that was handed out and
    not trained on. `seed`: with random numbers of the loader's own, as where several ranks fetch one batch.
    `needs_end`: streams are fetched ahead."""
    for place in (1, 2, 3, 4, 6, 7):
        for behind in (0, 1):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            first = EngineDataLoader(LOADERS[kind](), torch.device("cpu"), seed=seed, needs_end=needs_end)
            expected, (state, numbers) = batches_of(first, 14, place, behind)
            torch.manual_seed(9)
            second = EngineDataLoader(LOADERS[kind](), torch.device("cpu"), seed=seed, needs_end=needs_end)
            assert second.load_state_dict(state) is None
            set_random_numbers(numbers)
            if behind:  # what was drawn after the batch was handed out is drawn again
                assert batches_of(second, 1)[0] == expected[place : place + 1], (place, behind)
            else:
                assert batches_of(second, 14 - place)[0] == expected[place:], (place, behind)


@pytest.mark.parametrize("needs_end", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_it_goes_on_from_where_it_went_on(kind, seed, needs_end):
    """Saved after each batch, and loaded into another loader each time. With a seed also where the batch was not
    trained on: what is drawn again then does not change the next one."""

    def make():
        return EngineDataLoader(LOADERS[kind](), torch.device("cpu"), seed=seed, needs_end=needs_end)

    for behind in (0,) if seed is None else (0, 1):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        expected, (state, numbers) = batches_of(make(), 5, 1, behind)
        for place in range(1, 4):
            loader = make()
            loader.load_state_dict(state)
            set_random_numbers(numbers)
            seen, (state, numbers) = batches_of(loader, 1 + behind, 1, behind)
            assert seen[0] == expected[place], (place, behind)


def test_what_is_skipped_is_not_read():
    loader = LOADERS["shuffled"]()
    first = EngineDataLoader(loader, torch.device("cpu"))
    _, (state, _) = batches_of(first, 3, 3)
    other = LOADERS["shuffled"]()
    second = EngineDataLoader(other, torch.device("cpu"))
    second.load_state_dict(state)
    assert len(list(second)) == 2
    assert len(other.dataset.read) == 8
    assert len(list(second)) == 5, "only the rest of one epoch"


@pytest.mark.parametrize("stays", [False, True])
def test_workers(stays):
    """The order goes on; a copy of the loader reads the rest, with workers of its own. (Those that stay from epoch to
    epoch draw one number less in later ones.)"""

    def make():
        return DataLoader(list(range(SAMPLES)), 4, shuffle=True, num_workers=1, persistent_workers=stays)

    torch.manual_seed(0)
    first = EngineDataLoader(make(), torch.device("cpu"))
    expected, (state, numbers) = batches_of(first, 7, 2)
    second = EngineDataLoader(make(), torch.device("cpu"))
    second.load_state_dict(state)
    set_random_numbers(numbers)
    count = 3 if stays else 5
    assert batches_of(second, count)[0] == expected[2 : 2 + count]


def test_workers_that_stay_have_no_place_in_later_epochs():
    def make():
        return DataLoader(list(range(SAMPLES)), 4, shuffle=True, num_workers=1, persistent_workers=True)

    first = EngineDataLoader(make(), torch.device("cpu"))
    list(first)
    later = iter(first)
    next(later), first.note_training()
    second = EngineDataLoader(make(), torch.device("cpu"))
    assert "the data go on with epoch 2" in second.load_state_dict(first.state_dict())
    assert second.next_epoch == 2


def test_a_second_state_before_anything_is_iterated():
    first = EngineDataLoader(LOADERS["shuffled"](), torch.device("cpu"))
    expected, (state, _) = batches_of(first, 5, 3)
    second = EngineDataLoader(LOADERS["shuffled"](), torch.device("cpu"))
    second.load_state_dict(state)
    again = second.state_dict()
    third = EngineDataLoader(LOADERS["shuffled"](), torch.device("cpu"))
    third.load_state_dict(again)
    rest = [batches_of(each, 2)[0] for each in (second, third)]
    assert [index for index, _ in rest[0]] == [index for index, _ in rest[1]]
    assert [index for index, _ in rest[0]] == [index for index, _ in expected[3:]]


@pytest.mark.parametrize("trained", [3, 7])
def test_a_state_of_a_loader_that_ran_before(trained):
    """Of what was loaded, not of the epoch that ran before it: in the middle of an epoch, and at its end."""
    first = EngineDataLoader(LOADERS["in order"](), torch.device("cpu"))
    if trained == 7:
        list(first)
    else:
        batches_of(first, trained, trained)
    second = EngineDataLoader(LOADERS["in order"](), torch.device("cpu"))
    batches_of(second, 2, 2)
    second.load_state_dict(first.state_dict())
    third = EngineDataLoader(LOADERS["in order"](), torch.device("cpu"))
    third.load_state_dict(second.state_dict())
    assert (third.next_epoch, len(list(third))) == ((1, 7) if trained == 7 else (0, 7 - trained))


def test_another_epoch_was_asked_for():
    first = EngineDataLoader(LOADERS["in order"](), torch.device("cpu"))
    _, (state, _) = batches_of(first, 3, 3)
    second = EngineDataLoader(LOADERS["in order"](), torch.device("cpu"))
    second.load_state_dict(state)
    assert second.next_epoch == 0
    second.set_epoch(4)
    assert len(list(second)) == 7
    assert second.epoch == 4


def test_a_look_at_a_batch_is_no_epoch():
    loader = EngineDataLoader(LOADERS["in order"](), torch.device("cpu"))
    next(iter(loader))
    state = loader.state_dict()
    second = EngineDataLoader(LOADERS["in order"](), torch.device("cpu"))
    second.load_state_dict(state)
    assert (second.next_epoch, len(list(second))) == (1, 7)


def test_a_pass_within_another():
    """Over the same loader: the place is that of the outer one."""
    loader = EngineDataLoader(LOADERS["in order"](), torch.device("cpu"))
    for _ in loader:
        loader.note_training()
        if loader.epoch == 0:
            assert len(list(loader)) == 7
            break_off = loader.state_dict()
        break
    assert (break_off["epoch"], break_off["trained"], break_off["finished"]) == (0, 1, False)


@pytest.mark.parametrize(
    ("mine", "theirs", "batches", "expected"),
    [
        (Share("in order", 8), Share("in order", 8), 3, 3),
        (Share("own", 8), Share("own", 8), 3, 3),
        (Share("in order", 4), Share("in order", 8), 3, 6),
        (Share("seed 1", 8), Share("seed 1", 4), 6, 3),
        (Share("seed 1", 8), Share("seed 1", 4), 3, None),
        (Share("own", 8), Share("own", 4), 6, None),
        (Share("seed 1", 8), Share("seed 2", 4), 6, None),
        (Share("in order", 8), Share("own", 8), 6, None),
        (Share("seed 1, 1 generator(s)", 8), Share("seed 1", 8), 3, None),
    ],
)
def test_places_of_other_shares(mine, theirs, batches, expected):
    assert mine.same_place(theirs, batches) == expected


def test_the_own_order_of_another_rank_has_no_place():
    """Not even where it takes as many: its random numbers are not there."""
    assert Share("own", 8).same_place(Share("own", 8), 3, own=False) is None
    assert Share("seed 1", 8).same_place(Share("seed 1", 8), 3, own=False) == 3


def sharded(size, rank, seed=3):
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(range(24), 8 // size, shuffle=True, generator=generator)
    return EngineDataLoader(shard_loader(loader, rank, size, 7, pad=True), torch.device("cpu"))


def read(loaders, batches):
    """The samples of so many batches of all data ranks."""
    return sorted(sample for loader in loaders for batch in batches_read(loader, batches) for sample in batch.tolist())


def batches_read(loader, count):
    for number, batch in enumerate(loader):
        loader.note_training()
        yield batch
        if number == count - 1:
            return


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_generator_of_the_samplers_on_other_data_ranks(ranks, epoch):
    """Every sample once, in the epoch that was interrupted, and the order of the next is as it would have been."""
    first = [sharded(2, rank) for rank in range(2)]
    for _ in range(epoch):
        read(first, 3)
    seen = read(first, 1)
    state = copy.deepcopy(first[0].state_dict())
    read(first, 3)  # the next epoch
    second = [sharded(ranks, rank, seed=8) for rank in range(ranks)]
    assert [loader.load_state_dict(state, own=False) for loader in second] == [None] * ranks
    assert sorted(seen + read(second, 2)) == list(range(24))
    again = [sharded(2, rank) for rank in range(2)]
    for _ in range(epoch + 1):
        read(again, 3)
    assert read(second, 1) == read(again, 1)


def test_a_generator_that_a_single_rank_draws_seeds_from_too():
    """Another order: said, and the next epoch begins."""
    first = [sharded(2, rank) for rank in range(2)]
    read(first, 1)
    alone = sharded(1, 0)
    assert "the data go on with epoch 1" in alone.load_state_dict(first[0].state_dict(), own=False)
    assert read([alone], 3) == list(range(24))


def test_workers_seeds_of_another_rank_are_not_repeated():
    first = sharded(2, 0)
    read([first], 1)
    state = copy.deepcopy(first.state_dict())
    second, untouched = sharded(2, 1), sharded(2, 1)
    before = untouched.loader.generator.get_state()
    second.load_state_dict(state, own=False)
    assert torch.equal(second.loader.generator.get_state(), before)
    read([second], 1), read([untouched], 1)
    assert torch.equal(second.loader.generator.get_state(), untouched.loader.generator.get_state())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("shuffled", Share("own", 4)),
        ("in order", Share("in order", 3)),
        ("pairs", Share("own", 1)),
        ("sharded", Share("seed 7", 4)),
        ("sharded pairs", Share("batches, seed 7", 2)),
        ("strided stream", Share("batches, seed 7", 2)),
        ("a list", Share("own", 1)),
    ],
)
def test_shares(kind, expected):
    assert share(LOADERS[kind]()) == expected


def test_an_order_that_has_no_such_place():
    """Said, and the next epoch begins."""
    first = EngineDataLoader(LOADERS["shuffled"](), torch.device("cpu"))
    _, (state, _) = batches_of(first, 3, 3)
    second = EngineDataLoader(LOADERS["sharded"](), torch.device("cpu"))
    said = second.load_state_dict(state, own=False)
    assert said == (
        "3 batches of epoch 0 were trained on, which is not a place in this run's order of the data: the data go on "
        "with epoch 1"
    )
    assert len(list(second)) == 5
    assert second.epoch == 1


def test_an_epoch_that_has_no_batch_left_ends():
    """Saved in the last batch of an epoch: the scheduler is advanced at its end, once."""

    def make():
        engine = make_engine(
            {"lr_interval": "epoch"},
            model=MLP(),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        )
        return engine, engine.lr_scheduler

    engine, scheduler = make()
    for number, (x, y) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        if number == 5:
            state = copy.deepcopy(engine.state_dict())
    assert scheduler.last_epoch == 1
    other, its = make()
    other.load_state_dict(state)
    assert (its.last_epoch, other.dataloader.next_epoch) == (0, 0)
    assert list(other.dataloader) == []
    assert (its.last_epoch, other.dataloader.next_epoch) == (1, 1)
    assert isinstance(other, halfmesh.Engine)
