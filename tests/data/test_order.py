"""One order: in every layout the samples come as the user's own loader draws them in one process."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

import halfmesh
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import make_data, make_engine, sgd
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

SAMPLES, BATCH, EPOCHS = 16, 4, 3


class Numbers(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """It draws for each sample."""

    def __getitem__(self, index: int) -> float:
        return torch.rand(()).item() + random.random() + float(np.random.rand())


class Stream(IterableDataset):
    """Shuffles through a buffer: it draws all along an epoch."""

    def __iter__(self):
        buffer: list[int] = []
        for number in range(SAMPLES):
            buffer.append(number)
            if len(buffer) == 5:
                yield buffer.pop(int(torch.randint(5, ())))
        yield from buffer


class By(Sampler):
    """A sampler of the user's own."""

    def __init__(self, shuffle: Any) -> None:
        self.shuffle = shuffle

    def __iter__(self):
        items = list(range(SAMPLES))
        self.shuffle(items)
        yield from items

    def __len__(self) -> int:
        return SAMPLES


class Uncounted(Sampler):
    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# By the batch of one process, which several data ranks divide.
LOADERS = {
    "shuffled": lambda batch: DataLoader(Numbers(), batch, shuffle=True),
    "generator": lambda batch: DataLoader(Numbers(), batch, shuffle=True, generator=generator()),
    "sampler's generator": lambda batch: DataLoader(
        Numbers(), batch, sampler=RandomSampler(Numbers(), generator=generator())
    ),
    "both generators": lambda batch: DataLoader(
        Numbers(), batch, sampler=RandomSampler(Numbers(), True, 16, generator()), generator=generator()
    ),
    "weighted": lambda batch: DataLoader(Numbers(), batch, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "workers": lambda batch: DataLoader(Numbers(), batch, shuffle=True, num_workers=1, multiprocessing_context="fork"),
    "workers that stay": lambda batch: DataLoader(
        Numbers(), batch, shuffle=True, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    ),
    "drop last": lambda batch: DataLoader(Numbers(), batch, shuffle=True, drop_last=True),
    "python": lambda batch: DataLoader(Numbers(), batch, sampler=By(random.shuffle)),
    "numpy": lambda batch: DataLoader(Numbers(), batch, sampler=By(np.random.shuffle)),
    "no length": lambda batch: DataLoader(Numbers(), batch, sampler=Uncounted()),
    "stream": lambda batch: DataLoader(Stream(), batch),
    "stream, a worker": lambda batch: DataLoader(Stream(), batch, num_workers=1, multiprocessing_context="fork"),
}


def seed_all(seed: int = 5) -> None:
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(seed)


def epochs_of(loader: Any, eval_loader: Any) -> list[list[list[int]]]:
    """The samples of each batch, with an evaluation after each epoch, which draws as well."""
    seen = []
    for _ in range(EPOCHS):
        seen.append([batch.tolist() for batch in loader])
        assert list(eval_loader)
    return seen


def drawn_after() -> list[float]:
    """What the user's generators give."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def in_a_plain_loop(kind: str) -> tuple[list, list[float]]:
    seed_all()
    return epochs_of(LOADERS[kind](BATCH), DataLoader(Numbers(), 8)), drawn_after()


def engine_of(layout: str, loader: Any, **options: Any) -> halfmesh.Engine:
    """Built before random numbers are seeded."""
    config = {"parallel": LAYOUTS[layout][1], **options.pop("config", {})}
    engine = make_engine(config, loader=loader, **{"model": Net(), **options})
    seed_all()
    return engine


def through_engines(rank: int, world_size: int) -> dict[Any, Any]:
    """By layout, loader, and whether rank 1 has drawn other numbers before."""
    found: dict[Any, Any] = {}
    for layout in ("dp2", "tp2"):
        for kind, make in LOADERS.items():
            for others in (False, True):
                loader = make(BATCH // 2 if layout == "dp2" else BATCH)
                with engine_of(layout, loader, eval_dataloader=DataLoader(Numbers(), 8)) as engine:
                    if others and rank == 1:
                        drawn_after()
                    seen = epochs_of(engine.dataloader, engine.eval_dataloader)
                    found[layout, kind, others] = seen, drawn_after()
    return found


@pytest.mark.promise(
    "seeds",
    "data order and initial weights are those of one process in every layout; your generators stay yours",
    of="SageMaker",
    page="loop.md",
)
@pytest.mark.distributed
def test_the_order_is_that_of_a_plain_loop_in_every_layout():
    """And the user's generators are afterwards where it leaves them, on each rank that drew what rank 0 drew."""
    first, second = run_ranks(through_engines, 2, timeout=120, fresh=True)  # workers take long to be freed
    for (layout, kind, others), (seen, after) in first.items():
        expected, expected_after = in_a_plain_loop(kind)
        theirs, theirs_after = second[layout, kind, others]
        if layout == "tp2":
            assert theirs == seen
        else:
            in_turn = "stream" not in kind  # there ranks take turns in batches
            joined = [
                [joined_batch(*pair, in_turn) for pair in zip(*epochs, strict=True)]
                for epochs in zip(seen, theirs, strict=True)
            ]
            seen = joined
        if kind == "no length":  # later epochs begin where random numbers are: it has drawn ahead of the loop
            seen, expected = seen[:1], expected[:1]
        else:
            assert after == expected_after, (layout, kind, others)
            assert others or theirs_after == after, (layout, kind)
        assert seen == expected, (layout, kind, others)


def joined_batch(mine: list[int], theirs: list[int], in_turn: bool) -> list[int]:
    return [sample for pair in zip(mine, theirs, strict=True) for sample in pair] if in_turn else mine + theirs


class Endless(Sampler):
    """Has a length and no end; it is not to be read far ahead of the loop."""

    def __init__(self, of_batches: bool = False) -> None:
        self.of_batches = of_batches

    def __iter__(self):
        for _ in range(10_000):
            yield torch.randint(SAMPLES, (BATCH,)).tolist() if self.of_batches else int(torch.randint(SAMPLES, ()))
        raise AssertionError("it is read far ahead")

    def __len__(self) -> int:
        return 10**10


LONG = {
    "replacement": lambda batch: DataLoader(Numbers(), batch, sampler=RandomSampler(Numbers(), True, 10**6)),
    "generator": lambda batch: DataLoader(
        Numbers(), batch, sampler=RandomSampler(Numbers(), num_samples=10**6, generator=generator())
    ),
    "weighted": lambda batch: DataLoader(Numbers(), batch, sampler=WeightedRandomSampler([1.0] * SAMPLES, 10**5)),
    "endless": lambda batch: DataLoader(Numbers(), batch, sampler=Endless()),
    "workers": lambda batch: DataLoader(
        Numbers(), batch, sampler=Endless(), num_workers=1, multiprocessing_context="fork"
    ),
    "batches": lambda batch: DataLoader(Numbers(), batch_sampler=Endless(of_batches=True)),
}
LONG_STEPS, LONG_SAVED = 600, 550
"""More than is drawn at a time."""


def begin_long_epochs(rank: int, world_size: int) -> dict[str, Any]:
    """The batches of a run, and of one that goes on from a state of it."""
    found = {}
    for kind, make in LONG.items():
        with engine_of("dp2", make(BATCH // 2)) as engine:
            seen = []
            for batch in itertools.islice(engine.dataloader, LONG_STEPS):
                seen.append(batch.tolist())
                engine.dataloader.note_training()
                if len(seen) == LONG_SAVED:
                    state = engine.dataloader.state_dict()
        with engine_of("dp2", make(BATCH // 2)) as engine:
            engine.dataloader.load_state_dict(state)
            again = [batch.tolist() for batch in itertools.islice(engine.dataloader, LONG_STEPS - LONG_SAVED)]
        found[kind] = seen, again
    return found


@pytest.mark.distributed
def test_an_epoch_that_never_ends_is_drawn_as_the_loop_goes_on():
    first, second = run_ranks(begin_long_epochs, 2, timeout=120, fresh=True)
    for kind, (seen, again) in first.items():
        theirs, theirs_again = second[kind]
        seed_all()
        expected = [batch.tolist() for batch in itertools.islice(LONG[kind](BATCH), LONG_STEPS)]
        pairs = zip(seen, theirs, strict=True)
        if kind == "batches":
            joined = [batch for pair in pairs for batch in pair][:LONG_STEPS]
        else:
            joined = [joined_batch(*pair, True) for pair in pairs]
        assert joined == expected, kind
        assert (again, theirs_again) == (seen[LONG_SAVED:], theirs[LONG_SAVED:]), kind


def losses(rank: int, world_size: int, layout: str) -> tuple[list[float], torch.Tensor]:
    """As a script trains: seeded once, 3 epochs, shuffled, an evaluation between them."""
    seed_all()
    x, y = make_data(24)
    samples = list(zip(x, y, strict=True))
    loader = DataLoader(samples, 4 if layout in ("dp2", "fsdp") else 8, shuffle=True)
    config = {"parallel": LAYOUTS[layout][1]}
    engine = make_engine(config, loader=loader, model=Net(norm=nn.LayerNorm), eval_dataloader=DataLoader(samples, 8))
    seen = []
    for _ in range(EPOCHS):
        for inputs, targets in engine.dataloader:
            engine.zero_grad()
            loss = engine.criterion(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        with torch.no_grad():
            assert list(engine.eval_dataloader)
    return seen, close_whole(engine)["head.weight"]


@pytest.mark.promise("seeds")
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["dp2", "tp2", pytest.param("pp2", marks=pytest.mark.sends), "fsdp"])
def test_losses_are_those_of_one_process_with_the_whole_batch(layout):
    ((expected, weight),) = run_ranks(losses, 1, "one", init=False)
    results = run_ranks(losses, 2, layout)
    means = torch.tensor([seen for seen, _ in results]).mean(0)
    torch.testing.assert_close(means, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1], weight, rtol=1e-5, atol=1e-6)


def noise(rank: int, world_size: int) -> dict[str, list[Any]]:
    """What is fetched in two epochs, by layout, with the seeds 1, 1 and 2."""
    found: dict[str, list[Any]] = {"dp2": [], "tp2": []}
    for layout, runs in found.items():
        for seed in (1, 1, 2):
            with engine_of(layout, DataLoader(Noisy(), 4), config={"seed": seed}) as engine:
                if rank == 1:
                    drawn_after()
                runs.append([x for _ in range(2) for batch in engine.dataloader for x in batch.tolist()])
    return found


@pytest.mark.distributed
def test_seed_decides_what_batches_are_fetched_with():
    """Alike where ranks compute one batch, else by data rank; wherever the ranks' own generators are."""
    first, second = run_ranks(noise, 2)
    assert first["tp2"] == second["tp2"]
    for one, again, other in (first["dp2"], second["dp2"], first["tp2"]):
        assert one == again
        assert len({*one, *other}) == len(one) + len(other)
    assert not set(first["dp2"][0]) & set(second["dp2"][0])


def draw() -> float:
    return torch.rand((), device=rank_device()).item()


class Drawn(nn.Module):
    """A model that says what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(draw())
        return self.layer(x)


def model_draws(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for seed in (1, 1, 2):
        with engine_of("dp2" if world_size == 2 else "one", None, model=Drawn(), config={"seed": seed}) as engine:
            in_loop = []
            for _ in range(3):
                in_loop.append(draw())
                engine.backward(engine(here(torch.ones(2, 2) * (rank + 1))).sum())
                engine.step()
            engine.eval()
            engine(here(torch.ones(2, 2)))
            found.setdefault("model", []).append(engine.model.seen[:3])
            found.setdefault("loop", []).append([*in_loop, engine.model.seen[3]])
    return found


def draws_alone(rank: int, world_size: int) -> tuple[list[float], dict[Any, Any]]:
    seed_all()
    return [draw() for _ in range(7)], model_draws(0, 1)


@pytest.mark.promise("seeds")
@pytest.mark.distributed
def test_a_model_draws_from_its_own_sequence_on_several_ranks():
    """Dropout differs between data ranks that were seeded alike, and what the loop draws is the user's."""
    ((expected, alone),) = run_ranks(draws_alone, 1, init=False)
    assert (alone["loop"][0], alone["model"][0]) == ([*expected[:6:2], expected[6]], expected[1:6:2]), (
        "as in a plain loop"
    )
    first, second = run_ranks(model_draws, 2)
    assert first["loop"] == second["loop"] == [expected[:4]] * 3
    for found in (first, second):
        assert found["model"][0] == found["model"][1] != found["model"][2]
    assert not set(first["model"][0]) & (set(second["model"][0]) | set(expected))


def own_batches(rank: int, world_size: int) -> dict[str, list[str]]:
    """What is said of loops that do not iterate engine.dataloader."""
    x, y = make_data(32)
    samples = list(zip(x, y, strict=True))

    def drawn_by(seed: int) -> Any:
        torch.manual_seed(seed)
        return ((x[chosen], y[chosen]) for chosen in torch.randint(32, (4, 8)))

    loops = {
        "iterated": (DataLoader(samples, 8), None),
        "not given, alike": (None, lambda: drawn_by(0)),
        "not given, by rank": (None, lambda: drawn_by(rank)),
        "not given, by rank; other calls alike": (None, lambda: drawn_by(rank)),
    }
    said: dict[str, list[str]] = {}
    for name, (loader, batches) in loops.items():
        engine = halfmesh.initialize(Net(), sgd, nn.functional.cross_entropy, loader, {}, device=rank_device())
        with warnings() as said[name]:
            for _ in range(2):
                for inputs, targets in engine.dataloader if batches is None else batches():
                    outputs = engine(here(inputs))
                    if "other calls" in name:
                        engine.call("forward", here(x[:2]))
                        with torch.no_grad():
                            engine(here(x[:2]))
                    engine.backward(engine.criterion(outputs, here(targets)))
                    engine.step()
        engine.close()
    return said


@contextmanager
def warnings() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("halfmesh").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("halfmesh").removeHandler(handler)


SAME = "all 2 data ranks were given the same inputs in the first update"


@pytest.mark.promise(
    "data ranks that train on the same batches",
    "a warning",
    of="SageMaker",
    page="loop.md",
)
@pytest.mark.distributed
def test_a_loop_over_batches_that_are_not_sharded_is_told_once():
    first, second = run_ranks(own_batches, 2)
    assert all(not said for said in second.values()), "rank 0 speaks"
    expected = {"not given, alike": SAME}
    for name, said in first.items():
        assert len(said) == (name in expected), (name, said)
        assert name not in expected or said[0].startswith(f"[rank 0] {expected[name]}")


class Choosing(Numbers):
    """Another attribute."""


def attributes(rank: int, world_size: int) -> list[Any]:
    seen = []
    for loader in (DataLoader(Choosing(), 4, shuffle=True, drop_last=True), DataLoader(Stream(), 4)):
        with make_engine(loader=loader) as engine:
            ours = engine.dataloader
            seen.append([type(ours.dataset).__name__, ours.batch_size, ours.drop_last, ours.num_workers])
            assert ours.sampler is not None
            with pytest.raises(AttributeError, match="no attribute 'batchsize'"):
                _ = ours.batchsize
        seen.append(len(ours) if loader.drop_last else None)
    return seen


@pytest.mark.distributed
def test_the_engines_loader_has_the_attributes_of_the_one_that_was_given():
    for ranks, results in ((1, [attributes(0, 1)]), (2, run_ranks(attributes, 2))):
        assert results == [[["Choosing", 4, True, 0], 4 // ranks, ["Stream", 4, False, 0], None]] * ranks


class NumpySampler(By):
    """With a generator that is not torch's."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        super().__init__(self.generator.shuffle)


def by_numpy(rank: int, world_size: int) -> list[int]:
    with make_engine(loader=DataLoader(Numbers(), 4, sampler=NumpySampler())) as engine:
        return [sample for batch in engine.dataloader for sample in batch.tolist()]


@pytest.mark.distributed
def test_a_sampler_with_a_generator_of_numpys():
    first, second = run_ranks(by_numpy, 2)
    assert sorted(first + second) == list(range(SAMPLES))
