"""Ranks train the same model: from the start, and whenever some of its parameters are frozen or unfrozen."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.distributed.local_ranks import free_port
from tests.support.models import full_weights, make_data, make_engine, said, step_on
from tests.support.ranks import here, meet, run_ranks
from tests.support.tensor_parity import rejection

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}},
}


def make_model(frozen: int | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    if frozen is not None:
        model[frozen].requires_grad_(False)
    return model


def unlike(rank: int, world_size: int) -> tuple[list[str], dict[str, Any]]:
    """What is said of unlike models and optimizers; and, by layout, of unlike layers that are frozen: from the start,
    and after a step; and if the weights stay."""
    x, y = here(make_data())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    given = {"model": nn.Linear(2, 2 + rank)}, {"model": model, "optimizer": optimizer}
    found, models = {}, [said(make_engine, **options) for options in given]
    for name, layout in LAYOUTS.items():
        at_start = said(make_engine, {"parallel": layout}, model=make_model(2 if rank == 0 else 4))
        engine = make_engine({"parallel": layout}, model=make_model())
        step_on(engine, x, y)
        before = {name: value.clone() for name, value in full_weights(engine).items()}
        engine.model[2 if rank == 0 else 4].requires_grad_(False)
        later, after = said(step_on, engine, x, y), full_weights(engine)
        found[name] = at_start, later, all(torch.equal(before[n], after[n]) for n in before)
    return models, found


@pytest.mark.distributed
def test_unlike_ranks_are_rejected():
    for models, found in run_ranks(unlike, 2):
        for message, what in zip(models, ("the model's parameters", "the optimizer"), strict=True):
            assert message.startswith(f"{what} must be the same on all ranks")
            assert "on rank 1 differ from rank 0;" in message
        for layout, (at_start, later, unchanged) in found.items():
            for words in ("'2.weight' is trained on rank 1", " and frozen on rank 0", " (the first of 4 "):
                assert words in at_start
            assert "'2.weight' is trained on rank" in later, layout
            assert unchanged, layout


def only_one(rank: int, world_size: int, port: int, folder: str) -> str:
    meet(rank, world_size, folder)
    x, y = here(make_data())
    address, limit = f"tcp://localhost:{port}", timedelta(seconds=3)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=limit)
    engine = make_engine({"timeout": 3.0}, model=make_model())
    step_on(engine, x, y)
    if rank == 1:
        engine.model[2].requires_grad_(False)
    return rejection(lambda: step_on(engine, x, y))


@pytest.mark.distributed
def test_one_rank_alone_ends_by_the_time_limit(tmp_path):
    first, second = run_ranks(only_one, 2, free_port(), str(tmp_path), init=False, fresh=True)
    assert second.startswith("InputError: requires_grad was changed on rank 1, but not on all ranks"), second
    assert first.startswith(("RuntimeError", "DistBackendError")), first  # gloo's: it waits for the gradients of rank 1
