"""Each sample is seen by one data rank, once an epoch, whatever the loader; what cannot be sharded is rejected; data
that is each rank's own already, or that all ranks have alike; timm's loaders around a DataLoader."""

import itertools
import logging

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

import halfmesh
from halfmesh.trainer.trainer import Trainer
from tests.support.models import MLP, make_data, make_engine, said, sgd, train
from tests.support.ranks import here, rank_device, run_ranks

from .loaders import By, plain, seed_all

pytestmark = pytest.mark.distributed


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Reader(IterableDataset):
    """Gives one buffer again and again."""

    def __iter__(self):
        buffer = torch.empty(())
        for number in range(8):
            yield buffer.fill_(number)


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield from range(8)


class LongEndless(Endless):
    """It has a length, but is not to be read so far ahead."""

    def __len__(self):
        return 10**10


class OwnIter(DataLoader):
    """Iterates in its own way: over what torch's gives, once or for ever, or past it."""

    def __init__(self, way):
        super().__init__(TensorDataset(torch.arange(8)), 2)
        self.way = way

    def __iter__(self):
        if self.way == "past":
            yield from DataLoader(self.dataset, 2)
        elif self.way == "once":
            yield from (x + 1 for (x,) in super().__iter__())
        while self.way == "endless":
            yield from super().__iter__()


SHARDS = {  # what each of two ranks gets
    "in order": (lambda: DataLoader(range(16), 4), [[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]),
    "ragged": (lambda: DataLoader(range(11), 4), [[0, 2, 4, 6], [8, 10]], [[1, 3, 5, 7], [9, 0]]),
    "drop last": (lambda: DataLoader(range(11), 4, drop_last=True), [[0, 2, 4, 6]], [[1, 3, 5, 7]]),
    "batch sampler": (
        lambda: DataLoader(range(8), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7]]),
        [[0, 1, 2], [4, 5, 6, 7]],
        [[3], [0, 1, 2]],
    ),
    "distributed": (
        lambda: DataLoader(range(8), 2, sampler=DistributedSampler(range(8), 2, dist.get_rank(), shuffle=False)),
        [[0, 2], [4, 6]],
        [[1, 3], [5, 7]],
    ),
    "no batches": (lambda: DataLoader(range(4), batch_size=None), [0, 2], [1, 3]),
    "stream": (
        lambda: DataLoader(Stream(range(20)), 4),
        [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]],
        [[4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]],
    ),
    "one buffer": (lambda: DataLoader(Reader(), None), [0, 2, 4, 6], [1, 3, 5, 7]),
    "endless": (lambda: DataLoader(range(8), 2, sampler=Endless()), [[0, 2], [4, 6]] * 2, [[1, 3], [5, 7]] * 2),
    "long": (lambda: DataLoader(range(8), 2, sampler=LongEndless()), [[0, 2], [4, 6]] * 2, [[1, 3], [5, 7]] * 2),
    "own iter": (lambda: OwnIter("once"), [[1, 3], [5, 7]], [[2, 4], [6, 8]]),
}
EVALUATED = {  # nothing is counted twice
    "ragged": ([[0, 2, 4, 6], [8, 10]], [[1, 3, 5, 7], [9]]),
    "stream": ([[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]], [[4, 5, 6, 7], [12, 13, 14, 15]]),
}
REJECTED = {
    "shards itself": (
        lambda: DataLoader(Stream(range(dist.get_rank(), 16, 2)), 2),
        "the Stream gives different data on each rank",
    ),
    "another rank's": (
        lambda: DataLoader(range(16), 4, sampler=DistributedSampler(range(16), 4, 1)),
        "the dataloader's DistributedSampler has num_replicas=4, rank=1, but this is data rank 0 of 2",
    ),
    "empty": (lambda: DataLoader(range(3), 4, drop_last=True), "the dataloader has no batch for this rank"),
    "own order": (
        lambda: DataLoader(range(16), 4, sampler=By(np.random.default_rng().shuffle)),
        "the By gives different data on",
    ),
    "past its sampler": (lambda: OwnIter("past"), "OwnIter overrides __iter__ without using its sampler"),
    "again and again": (lambda: OwnIter("endless"), "reads its samples twice in one epoch"),
}


def shards(rank, world_size):
    """What this rank sees of each loader. The ranks draw other numbers from here on."""
    seed_all(rank)
    seen = {}
    for name, (make, *_) in SHARDS.items():
        with make_engine(loader=make()) as engine:
            seen[name] = [plain(batch) for batch in itertools.islice(engine.dataloader, 4)]
    for name in EVALUATED:
        with make_engine(eval_dataloader=SHARDS[name][0]()) as engine:
            seen[f"{name}, evaluated"] = [plain(batch) for batch in engine.eval_dataloader]
    with make_engine(loader=DataLoader(TensorDataset(*make_data(7)), 2)) as engine:
        seen["uneven"] = [len(x) for x, _ in engine.dataloader], len(train(engine))
    for name, (make, _) in REJECTED.items():
        seen[name] = said(iterate, make())
    return seen


def iterate(loader):
    with make_engine(loader=loader) as engine:
        list(engine.dataloader)


@pytest.mark.promise("DistributedSampler, `join`", "any loader is sharded once", of="SageMaker", page="loop.md")
def test_every_kind_of_loader_is_sharded_once():
    """Training pads, so that both ranks have as many batches and nobody waits."""
    results = run_ranks(shards, 2, timeout=120)
    for rank, found in enumerate(results):
        expected = {name: cells[1 + rank] for name, cells in SHARDS.items()}
        expected |= {f"{name}, evaluated": cells[rank] for name, cells in EVALUATED.items()}
        expected["uneven"] = ([2, 2], 2)
        assert {name: found[name] for name in expected} == expected
    for name, (_, message) in REJECTED.items():
        assert message in results[0][name], name


class OwnStream(IterableDataset):
    """Every so many samples, from this rank's on; the generators of ranks are not alike."""

    def __init__(self, count=16):
        self.count = count

    def __iter__(self):
        for index in range(dist.get_rank(), self.count, dist.get_world_size()):
            yield torch.tensor([index, int(torch.randint(1000, ()))])


class Node(OwnStream):
    """As of Hugging Face's split_dataset_by_node: a stream that is made for a rank."""

    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size


class Counted(OwnStream):
    def __len__(self):
        return len(range(dist.get_rank(), self.count, dist.get_world_size()))


def own(rank, world_size):
    found = {}
    samples = [torch.tensor([i, i]) for i in range(rank, 16, world_size)]
    streams = {"stream": DataLoader(OwnStream(), 2), "counted": DataLoader(Counted(), 2)}
    for name, loader in (streams | {"map-style": DataLoader(samples, 2, shuffle=True)}).items():
        with make_engine(loader=loader, sharded=True) as engine:
            torch.manual_seed(rank)
            found[name] = [[row for batch in engine.dataloader for row in batch.tolist()] for _ in range(2)]
    mine, other = DataLoader(Node(rank, world_size), 2), DataLoader(Node(0, 4), 2)
    with make_engine(loader=mine, eval_dataloader=mine) as engine:
        both = engine.dataloader, engine.eval_dataloader
        found["seen"] = [[row[0] for batch in each for row in batch.tolist()] for each in both]
        found["to predict"] = said(Trainer(engine).predict, other)
    found["other rank"] = [said(make_engine, loader=other), said(make_engine, eval_dataloader=other)]
    found["unequal"] = said(make_engine, loader=DataLoader(Counted(17), 1), sharded=True)
    return found


def test_data_of_this_rank_is_taken_as_it_is():
    everyone = run_ranks(own, 2)
    for rank, found in enumerate(everyone):
        for name in ("stream", "counted", "map-style"):
            for epoch in found[name]:
                assert sorted(row[0] for row in epoch) == list(range(rank, 16, 2)), name
        mine, theirs = ([[row[1] for row in epoch] for epoch in each["stream"]] for each in everyone)
        assert mine[0] != mine[1], "other numbers in each epoch"
        assert mine[0] != theirs[0], "the numbers of this rank's generators"
        assert found["seen"] == [list(range(rank, 16, 2))] * 2, "neither divided again, nor in evaluation"
        for words in (*found["other rank"], found["to predict"]):
            assert f"the dataloader's Node has world_size=4, rank=0, but this is data rank {rank} of 2" in words
        assert "shards itself, but has 9 batches on some ranks and 8 on others" in found["unequal"]


def loops(rank, world_size):
    """What is said of loops over data of several kinds."""
    x, y = make_data(32)

    def drawn_by(seed):
        torch.manual_seed(seed)
        return [(x[chosen], y[chosen]) for chosen in torch.randint(32, (4, 8))]

    found, told, handler = {}, [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("halfmesh").addHandler(handler)
    for name, batches, options in (
        ("the engine's", None, {}),
        ("called its own, alike", None, {"sharded": True}),
        ("not given, alike", drawn_by(0), {}),
        ("not given, by rank", drawn_by(rank), {}),
    ):
        loader = DataLoader(TensorDataset(x, y), 8) if batches is None else None
        options |= {"device": rank_device()}
        with halfmesh.initialize(MLP(), sgd, torch.nn.functional.cross_entropy, loader, {}, **options) as engine:
            for inputs, targets in engine.dataloader if batches is None else batches:
                engine.backward(engine.criterion(engine(here(inputs)), here(targets)))
                engine.step()
        found[name] = [*told]
        told.clear()
    logging.getLogger("halfmesh").removeHandler(handler)
    return found


def test_the_same_batches_on_each_rank_are_told_once():
    first, second = run_ranks(loops, 2)
    assert all(not told for told in second.values()), "rank 0 speaks"
    for name, told in first.items():
        assert len(told) == (name in ("called its own, alike", "not given, alike")), (name, told)
        for words in told:
            assert words.startswith("[rank 0] all 2 data ranks got the same inputs in the first update")


def prefetched(rank, world_size):
    """The batches of timm's loop and of the engine's, of all samples; and an evaluation of them."""
    prefetch, cpu = pytest.importorskip("timm.data.loader").PrefetchLoader, torch.device("cpu")
    images = torch.randint(256, (6, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(images, torch.arange(6) % 4)
    given, whole = prefetch(DataLoader(samples, 6 // world_size), device=cpu, re_prob=0.5), DataLoader(samples, 6)
    theirs = list(whole := prefetch(whole, device=cpu))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 4))
    with make_engine(model=model, loader=given, eval_dataloader=whole) as engine:
        for x, y in engine.dataloader:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        assert len(engine.dataloader) == 1
        return theirs, [(x.cpu(), y.cpu()) for x, y in engine.eval_dataloader], Trainer(engine).predict(whole).shape


def test_timms_prefetcher_normalises_what_each_rank_gets():
    results = run_ranks(prefetched, 2)
    ((images, labels),) = results[0][0]
    for rank, (_, (batch,), shape) in enumerate(results):
        torch.testing.assert_close(batch, (images[rank::2], labels[rank::2]), rtol=0, atol=0)
        assert shape == (6, 4)
