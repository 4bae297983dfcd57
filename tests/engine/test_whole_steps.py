"""Optimizers that step parameters as a whole have their state at the owners: Muon, LAMB, Adafactor, and own ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh.parallel import whole_steps
from tests.support.models import make_data, make_engine, step_on
from tests.support.optimizers import Whitened
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

X, Y = make_data(16)
TENSOR = {"tensor": {"size": 2, "plan": {"first": "colwise_gather", "last": "rowwise_split"}}}


def start(optimizer: Any, parallel: Any, config: Any = None, **options: Any) -> Any:
    config = {"clip_grad_norm": 0.5, "parallel": parallel, **(config or {})}
    return make_engine(config, optimizer=optimizer, **options)


def train(engine: Any, updates: Any) -> None:
    size = len(X) // engine.context.dp_size
    own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
    for update in updates:
        engine.zero_grad()
        step_on(engine, X.roll(update, 0)[own], Y.roll(update, 0)[own])


# -- state -------------------------------------------------------------------------------------------------------------


def go_on(rank: int, world_size: int, make: Any, parallel: Any, saved: Any, folder: Any) -> dict[str, Any]:
    """Trains on what was saved, if anything was, and saves it before the last update."""
    engine = start(make, parallel)
    average = engine.averaged_model(0.5)
    assert ("whole matrices on one rank each" in engine.plan.rows["update"]) == bool(parallel)
    train(engine, [7] if saved else [0, 1])  # a state of its own, to be overwritten
    if saved:
        engine.load(saved)
    engine.save(folder)
    train(engine, [2])
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    with average.applied():
        averaged = engine.full_state_dict(rank0_only=False)
    engine.close()
    return {"weights": full["model"], "average": averaged, "state": full["optimizer"]["state"]}


@pytest.mark.parametrize(
    ("make", "parallel"),
    [
        (partial(optim.Adafactor, lr=0.01), {"data": "fsdp"}),
        (partial(Whitened, lr=0.01), TENSOR),
    ],
)
def test_state_is_resharded(make, parallel, tmp_path):
    """From one process to a layout, and from that to one process."""
    expected = go_on(0, 1, make, {}, None, tmp_path / "one")
    by_rank = run_ranks(go_on, 2, make, parallel, tmp_path / "one", tmp_path / "many")
    for found in (*by_rank, go_on(0, 1, make, {}, tmp_path / "many", tmp_path / "again")):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


# -- what each rank holds and sends ------------------------------------------------------------------------------------


def held_and_sent(rank: int, world_size: int, parallel: Any, widths: Sequence[int]) -> tuple[int, int]:
    """The elements of optimizer state on this rank, and those that it sends in an update besides the reductions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in pairwise(widths)))
    engine = halfmesh.initialize(
        model, optim.Muon(model.parameters(), lr=0.1), nn.functional.mse_loss, None, {"parallel": parallel}
    )
    sent, send = [0], whole_steps.send_rows

    def counted(flat: torch.Tensor, sizes: list[int], received: list[int], group: Any) -> torch.Tensor:
        sent[0] += sum(sizes) - sizes[group.rank()]
        return send(flat, sizes, received, group)

    whole_steps.send_rows = counted
    try:
        engine.backward(engine.criterion(engine(torch.ones(2, 8)), torch.zeros(2, 8)))
        engine.step()
    finally:
        whole_steps.send_rows = send
    state = [value for values in engine.optimizer.state.values() for value in values.values()]
    return sum(value.numel() for value in state if value.dim()), sent[0]


def test_owners_have_equal_shares_and_only_slices_elsewhere_are_sent():
    """Of 8 matrices each of 4 ranks steps a large one or three small ones. Slices of gradients and weights that are
    elsewhere are sent, and back those of new weights. zero1 lays whole ones out, unless most would be padding."""
    widths = [8, 8, 24, 8, 8, 8, 8, 8, 8]
    assert run_ranks(held_and_sent, 4, {"data": "zero1"}, widths) == [(192, 0)] * 4
    found = run_ranks(held_and_sent, 4, {"data": "zero1"}, [8, 8])
    assert sorted(found) == [(0, 2 * 16), (0, 2 * 16), (0, 2 * 16), (64, 3 * 16)]
    assert run_ranks(held_and_sent, 4, {"data": "fsdp"}, widths) == [(192, 3 * 192 * 3 // 4)] * 4
