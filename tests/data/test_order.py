"""One order: in every layout the samples come as the user's own loader draws them in one process."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

import halfmesh
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import make_engine
from tests.support.ranks import here, rank_device, run_ranks

from .loaders import LOADERS, SAMPLES, Noisy, Numbers, generator, joined, samples_of, seed_all

pytestmark = pytest.mark.distributed
BATCH, EPOCHS = 4, 3


def epochs_of(loader: Any, eval_loader: Any) -> list[list[list[int]]]:
    """The samples of each batch, with an evaluation after each epoch, which draws as well."""
    seen = []
    for _ in range(EPOCHS):
        seen.append([samples_of(batch) for batch in loader])
        assert list(eval_loader)
    return seen


def drawn_after() -> list[float]:
    """What the user's generators give."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


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
                loader = make(Numbers(), BATCH // 2 if layout == "dp2" else BATCH)
                with engine_of(layout, loader, eval_dataloader=DataLoader(Numbers(), 8)) as engine:
                    if others and rank == 1:
                        drawn_after()
                    seen = epochs_of(engine.dataloader, engine.eval_dataloader)
                    found[layout, kind, others] = seen, drawn_after()
    return found


@pytest.mark.promise("seeds", "data order and weights of one process", of="SageMaker", page="loop.md")
def test_the_order_is_that_of_a_plain_loop_in_every_layout():
    """And the user's generators are afterwards where it leaves them, on each rank that drew what rank 0 drew."""
    first, second = run_ranks(through_engines, 2, timeout=120, fresh=True)  # workers take long to be freed
    for (layout, kind, others), (seen, after) in first.items():
        seed_all()
        plain_loop = epochs_of(LOADERS[kind](Numbers(), BATCH), DataLoader(Numbers(), 8))
        expected, expected_after = [sum(epoch, []) for epoch in plain_loop], drawn_after()  # noqa: RUF017 - few
        theirs, theirs_after = second[layout, kind, others]
        if layout == "tp2":
            assert theirs == seen
            found = [sum(epoch, []) for epoch in seen]  # noqa: RUF017
        else:
            found = [joined(kind, *epochs) for epochs in zip(seen, theirs, strict=True)]
        if kind == "no length":  # later epochs begin where random numbers are: it has drawn ahead of the loop
            found, expected = found[:1], expected[:1]
        else:
            assert after == expected_after, (layout, kind, others)
            assert others or theirs_after == after, (layout, kind)
        assert found == expected, (layout, kind, others)


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
    "generator": lambda batch: DataLoader(
        Numbers(), batch, sampler=RandomSampler(Numbers(), num_samples=10**6, generator=generator())
    ),
    "endless": lambda batch: DataLoader(Numbers(), batch, sampler=Endless()),
    "pairs without end": lambda batch: DataLoader(Numbers(), batch_sampler=Endless(of_batches=True)),
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


def test_an_epoch_that_never_ends_is_drawn_as_the_loop_goes_on():
    first, second = run_ranks(begin_long_epochs, 2)
    for kind, (seen, again) in first.items():
        theirs, theirs_again = second[kind]
        seed_all()
        batches = itertools.islice(LONG[kind](BATCH), 2 * LONG_STEPS if "pairs" in kind else LONG_STEPS)
        assert joined(kind, seen, theirs) == [sample for batch in batches for sample in batch.tolist()], kind
        assert (again, theirs_again) == (seen[LONG_SAVED:], theirs[LONG_SAVED:]), kind


def noise(rank: int, world_size: int) -> dict[str, list[Any]]:
    """What is fetched in two epochs, by layout, with the seeds 1, 1 and 2."""
    found: dict[str, list[Any]] = {"dp2": [], "tp2": []}
    for layout, runs in found.items():
        for seed in (1, 1, 2):
            with engine_of(layout, DataLoader(Noisy(), 4), config={"seed": seed}) as engine:
                if rank == 1:
                    drawn_after()
                runs.append([x for _ in range(2) for _, batch in engine.dataloader for x in batch.tolist()])
    return found


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
