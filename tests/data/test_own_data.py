"""Data that is each rank's own already, or that all ranks have alike; and timm's loaders around a DataLoader."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import halfmesh
from halfmesh.trainer.trainer import Trainer
from tests.support.models import MLP, make_data, make_engine, said, sgd
from tests.support.ranks import here, rank_device, run_ranks


class OwnStream(IterableDataset):
    """Every so many samples, from this rank's on; the generators of ranks are not alike."""

    def __init__(self, count: int = 16) -> None:
        self.count = count

    def __iter__(self) -> Any:
        for index in range(dist.get_rank(), self.count, dist.get_world_size()):
            yield torch.tensor([index, int(torch.randint(1000, ()))])


class Node(OwnStream):
    """As of Hugging Face's split_dataset_by_node: a stream that is made for a rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size


class Counted(OwnStream):
    def __len__(self) -> int:
        return len(range(dist.get_rank(), self.count, dist.get_world_size()))


def own(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, dataset in (
        ("stream", OwnStream()),
        ("counted", Counted()),
        ("map-style", [torch.tensor([i, i]) for i in range(rank, 16, world_size)]),
    ):
        loader = DataLoader(dataset, 2, shuffle=True) if name == "map-style" else DataLoader(dataset, 2)
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


@pytest.mark.distributed
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


def loops(rank: int, world_size: int) -> dict[str, list[str]]:
    """What is said of loops over data of several kinds."""
    x, y = make_data(32)

    def drawn_by(seed: int) -> Any:
        torch.manual_seed(seed)
        return [(x[chosen], y[chosen]) for chosen in torch.randint(32, (4, 8))]

    found: dict[str, list[str]] = {}
    for name, batches, options in (
        ("the engine's", None, {}),
        ("called its own, alike", None, {"sharded": True}),
        ("not given, alike", drawn_by(0), {}),
        ("not given, by rank", drawn_by(rank), {}),
    ):
        loader = DataLoader(TensorDataset(x, y), 8) if batches is None else None
        options |= {"device": rank_device()}
        engine = halfmesh.initialize(MLP(), sgd, torch.nn.functional.cross_entropy, loader, {}, **options)
        with warnings() as found[name], engine:
            for inputs, targets in engine.dataloader if batches is None else batches:
                engine.backward(engine.criterion(engine(here(inputs)), here(targets)))
                engine.step()
    return found


@contextmanager
def warnings() -> Iterator[list[str]]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("halfmesh").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("halfmesh").removeHandler(handler)


@pytest.mark.distributed
def test_the_same_batches_on_each_rank_are_told_once():
    first, second = run_ranks(loops, 2)
    assert all(not told for told in second.values()), "rank 0 speaks"
    for name, told in first.items():
        assert len(told) == (name in ("called its own, alike", "not given, alike")), (name, told)
        for words in told:
            assert words.startswith("[rank 0] all 2 data ranks got the same inputs in the first update")


def collate(samples: Any) -> Any:
    """Images as timm's fast_collate gives them."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def prefetched(rank: int, world_size: int) -> tuple[list[Any], list[Any], Any]:
    """The batches of timm's loop and of the engine's, of all samples; and an evaluation of them."""
    loader_module = pytest.importorskip("timm.data.loader")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (6, 3, 4, 4), dtype=torch.uint8, generator=generator)
    samples = [(image, index % 4) for index, image in enumerate(images)]
    inner = DataLoader(samples, 6 // world_size, collate_fn=collate)
    given = loader_module.PrefetchLoader(inner, device=torch.device("cpu"), re_prob=0.5)
    whole = loader_module.PrefetchLoader(DataLoader(samples, 6, collate_fn=collate), device=torch.device("cpu"))
    theirs = list(whole)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 4))
    with make_engine(model=model, loader=given, eval_dataloader=whole) as engine:
        for x, y in engine.dataloader:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        assert len(engine.dataloader) == 1
        return theirs, [(x.cpu(), y.cpu()) for x, y in engine.eval_dataloader], Trainer(engine).predict(whole).shape


@pytest.mark.distributed
def test_timms_prefetcher_normalises_what_each_rank_gets():
    results = run_ranks(prefetched, 2)
    ((images, labels),) = results[0][0]
    for rank, (_, ((x, y),), shape) in enumerate(results):
        torch.testing.assert_close(x, images[rank::2], rtol=0, atol=0)
        torch.testing.assert_close(y, labels[rank::2])
        assert shape == (6, 4)
