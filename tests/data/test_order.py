"""One order: in every layout the samples come as the user's own loader draws them in one process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import halfmesh
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import make_engine
from tests.support.ranks import here, rank_device, run_ranks

from .loaders import LOADERS, Noisy, Numbers, joined, samples_of, seed_all

pytestmark = pytest.mark.distributed
BATCH, EPOCHS = 4, 2


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
    """By layout and loader. Rank 1 has drawn other numbers before."""
    found: dict[Any, Any] = {}
    for layout in ("dp2", "tp2"):
        for kind, make in LOADERS.items():
            loader = make(Numbers(), BATCH // 2 if layout == "dp2" else BATCH)
            with engine_of(layout, loader, eval_dataloader=DataLoader(Numbers(), 8)) as engine:
                if rank == 1:
                    drawn_after()
                seen = epochs_of(engine.dataloader, engine.eval_dataloader)
                found[layout, kind] = seen, drawn_after()
    return found


@pytest.mark.promise("seeds", "data order and weights of one process", of="SageMaker", page="loop.md")
def test_the_order_is_that_of_a_plain_loop_in_every_layout():
    """And the user's generators are afterwards where it leaves them."""
    first, second = run_ranks(through_engines, 2, timeout=120, fresh=True)  # workers take long to be freed
    for (layout, kind), (seen, after) in first.items():
        seed_all()
        plain_loop = epochs_of(LOADERS[kind](Numbers(), BATCH), DataLoader(Numbers(), 8))
        expected, expected_after = [sum(epoch, []) for epoch in plain_loop], drawn_after()  # noqa: RUF017 - few
        theirs, _ = second[layout, kind]
        if layout == "tp2":
            assert theirs == seen
            found = [sum(epoch, []) for epoch in seen]  # noqa: RUF017
        else:
            found = [joined(kind, *epochs) for epochs in zip(seen, theirs, strict=True)]
        if kind == "no length":  # later epochs begin where random numbers are: it has drawn ahead of the loop
            found, expected = found[:1], expected[:1]
        else:
            assert after == expected_after, (layout, kind)
        assert found == expected, (layout, kind)


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


def model_draws(rank: int, world_size: int) -> tuple[list[Any], list[Any]]:
    """What the model draws, with the seeds 1, 1 and 2, and what the loop draws."""
    models, loops = [], []
    for seed in (1, 1, 2):
        with engine_of("dp2", None, model=Drawn(), config={"seed": seed}) as engine:
            loops.append([])
            for _ in range(3):
                loops[-1].append(draw())
                engine.backward(engine(here(torch.ones(2, 2) * (rank + 1))).sum())
                engine.step()
            models.append(engine.model.seen)
    return models, loops


@pytest.mark.promise("seeds")
def test_a_model_draws_from_its_own_sequence_on_several_ranks():
    """Dropout differs between data ranks that were seeded alike, and what the loop draws is the user's."""
    (models, loops), (others, other_loops) = run_ranks(model_draws, 2)
    assert loops == other_loops
    assert loops[0] == loops[2]
    for found in (models, others):
        assert found[0] == found[1] != found[2]
    assert not {*models[0]} & {*others[0], *loops[0]}
