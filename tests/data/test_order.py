"""One order: in every layout the samples come as the user's own loader draws them in one process; and what is drawn."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import make_engine
from tests.support.ranks import here, rank_device, run_ranks

from .loaders import LOADERS, Noisy, Numbers, joined, samples_of, seed_all

pytestmark = pytest.mark.distributed
BATCH = 4


def epochs_of(loader, eval_loader):
    """The samples of each batch of two epochs, with an evaluation after each, which draws as well; and what the user's
    generators give then."""
    seen = []
    for _ in range(2):
        seen.append([samples_of(batch) for batch in loader])
        assert list(eval_loader)
    return seen, [torch.rand(()).item(), random.random(), float(np.random.rand())]


def engine_of(rank, layout, loader, model=None, seed=0, **options):
    """Built before random numbers are seeded. Rank 1 has drawn other numbers before."""
    config = {"parallel": LAYOUTS[layout][1], "seed": seed}
    engine = make_engine(config, loader=loader, model=Net() if model is None else model, **options)
    seed_all()
    if rank == 1:
        torch.rand(()), random.random(), np.random.rand()
    return engine


def through_engines(rank, world_size):
    """By layout and loader."""
    found = {}
    for layout in ("dp2", "tp2"):
        for kind, make in LOADERS.items():
            loader = make(Numbers(), BATCH // 2 if layout == "dp2" else BATCH)
            with engine_of(rank, layout, loader, eval_dataloader=DataLoader(Numbers(), 8)) as engine:
                found[layout, kind] = epochs_of(engine.dataloader, engine.eval_dataloader)
    return found


@pytest.mark.promise("seeds", "data order and weights of one process", of="SageMaker", page="loop.md")
def test_the_order_is_that_of_a_plain_loop_in_every_layout():
    """And the user's generators are afterwards where it leaves them."""
    first, second = run_ranks(through_engines, 2, timeout=120, fresh=True)  # workers take long to be freed
    for (layout, kind), (seen, after) in first.items():
        seed_all()
        plain_loop, expected_after = epochs_of(LOADERS[kind](Numbers(), BATCH), DataLoader(Numbers(), 8))
        expected = [sum(epoch, []) for epoch in plain_loop]  # noqa: RUF017 - few
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


def draw():
    return torch.rand((), device=rank_device()).item()


class Drawn(nn.Module):
    """A model that says what it draws."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2), []

    def forward(self, x):
        self.seen.append(draw())
        return self.layer(x)


def drawn(rank, world_size):
    """With the seeds 1, 1 and 2: what is fetched in two epochs by layout, what the model draws, and what the loop."""
    found = {"dp2": [], "tp2": [], "model": [], "loop": []}
    for seed in (1, 1, 2):
        for layout in ("dp2", "tp2"):
            with engine_of(rank, layout, DataLoader(Noisy(), 4), seed=seed) as engine:
                found[layout].append([x for _ in range(2) for _, batch in engine.dataloader for x in batch.tolist()])
        with engine_of(0, "dp2", None, model=Drawn(), seed=seed) as engine:
            found["loop"].append([])
            for _ in range(3):
                found["loop"][-1].append(draw())
                engine.backward(engine(here(torch.ones(2, 2) * (rank + 1))).sum())
                engine.step()
            found["model"].append(engine.model.seen)
    return found


@pytest.mark.promise("seeds")
def test_seed_decides_what_is_drawn():
    """Alike where ranks compute one batch, else by data rank; wherever the ranks' own generators are. What a model
    draws differs between data ranks that were seeded alike, and what the loop draws is the user's."""
    first, second = run_ranks(drawn, 2)
    assert first["tp2"] == second["tp2"]
    for one, again, other in (first["dp2"], second["dp2"], first["tp2"], first["model"], second["model"]):
        assert one == again
        assert len({*one, *other}) == len(one) + len(other)
    assert not set(first["dp2"][0]) & set(second["dp2"][0])
    loops = first["loop"]
    assert loops == second["loop"]
    assert loops[0] == loops[2]
    assert not {*first["model"][0]} & {*second["model"][0], *loops[0]}
