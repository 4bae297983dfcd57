"""Random numbers under a pipeline, and batches that microbatches do not divide."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.models import CLASSES, FEATURES, make_data, make_loader, said
from tests.support.pipeline_parts import SCHEDULES, Deep, make, pipe, step
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


class Recorded(nn.Dropout):
    """Keeps its masks."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if type(x) is torch.Tensor:  # not a tensor without memory
            self.masks.append((output != 0).detach())
        return output


def masks(rank: int, world_size: int, tensor: bool) -> dict[str, Any]:
    """Of this rank's dropout in two updates: 2 stages x 2 ranks, each with dropout of the same shape; one rank draws
    numbers of its own between."""
    torch.manual_seed(rank)
    config = pipe(partition=("2",)) | ({} if tensor else {"seed": 3})
    if tensor:
        config["parallel"]["tensor"] = {"size": 2, "plan": {"0": "colwise_gather", "2": "colwise_gather"}}
    model = nn.Sequential(nn.Linear(FEATURES, 16), Recorded(), nn.Linear(16, 16), Recorded(), nn.Linear(16, CLASSES))
    engine = make(config, model)
    torch.manual_seed(7)
    for _ in range(2):
        if rank == 1:
            torch.rand(5, device=rank_device())
        step(engine, *make_data(8))
    found = (model[1] if engine.context.pp_rank == 0 else model[3]).masks
    outside = torch.rand(3, device=rank_device())
    torch.manual_seed(7)
    return {"masks": found, "as from the start": torch.equal(outside, torch.rand(3, device=rank_device()))}


def test_every_microbatch_stage_and_data_rank_drops_otherwise():
    results = run_ranks(masks, 4, False)
    flat = [mask.flatten().tolist() for result in results for mask in result["masks"]]
    assert len(flat) == 4 * 2 * 2
    assert all(first != second for i, first in enumerate(flat) for second in flat[:i])
    # What the user draws does not depend on the model.
    assert [result["as from the start"] for result in results] == [True, False, True, True]


def test_a_tensor_group_drops_alike_in_each_stage():
    """On activations that each of its ranks has whole."""
    first, second, third, fourth = (result["masks"] for result in run_ranks(masks, 4, True))
    torch.testing.assert_close([first, third], [second, fourth], rtol=0, atol=0)
    assert all(not torch.equal(mask, other) for mask in first for other in third)


class Jumps(nn.Module):
    """Draws of every kind."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.seen: list[tuple[float, float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = random.random(), float(np.random.rand())
        self.seen.append(drawn)
        return x + self.factor * (sum(drawn) + torch.rand_like(x))


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    random.random(), np.random.rand()
    return nn.functional.cross_entropy(output + 0.01 * torch.randn_like(output), target)


def draws(rank: int, world_size: int) -> dict[str, Any]:
    model = Deep(Jumps(0.1))
    engine = make(pipe() | {"seed": 7}, model, criterion=noisy)
    x, y = here(make_data(8))
    engine.model.eval()
    model[3].train()  # as Monte Carlo dropout
    with torch.no_grad():
        engine(x)
    engine.train()
    model[3].seen.clear()
    for _ in range(3):
        step(engine, x, y)
    saved = engine.state_dict()["random"]["host"]
    outside = torch.rand(2, device=rank_device()).tolist(), random.random(), float(np.random.rand())
    return {"outside": outside, "seen": list(model[3].seen), "saved": saved is not None}


def test_what_a_stage_or_the_criterion_draws_does_not_part_the_ranks():
    first, second = run_ranks(draws, 2)
    assert first["outside"] == second["outside"]
    assert first["saved"]
    assert second["saved"]
    [seen] = [result["seen"] for result in (first, second) if len(set(result["seen"])) > 1]
    assert len(set(seen)) == len(seen) == 3 * 2  # each microbatch draws anew


# -- ragged batches


def tails(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    loaders = {"loader": make_loader(22, 8), "eval_dataloader": make_loader(22, 5)}
    engine = make(config | {"gradient_accumulation": 2}, **loaders)
    losses = [step(engine, x, y)[1].item() for _ in range(2) for x, y in engine.dataloader]
    engine.eval()
    outputs = [engine(x) for x, _ in engine.eval_dataloader]
    seen = engine.context.all_reduce(here(torch.tensor(sum(map(len, outputs)) if engine.context.is_last_stage else 0)))
    return {"losses": losses, "seen": int(seen), "weights": close_whole(engine)}


@pytest.mark.promise(
    "batches that microbatches do not divide",
    "run in other microbatches, or rejected",
    of="SageMaker",
    page="pipeline.md",
)
@pytest.mark.parametrize("schedule", [name for name in ("1f1b", "interleaved", "zbv") if name in SCHEDULES])
def test_ragged_last_batches_are_run_in_other_microbatches_or_rejected(schedule):
    expected = tails(0, 1, {"parallel": {}})
    assert expected["seen"] == 22
    for found in run_ranks(tails, 2, pipe(microbatches=4, schedule=schedule, **SCHEDULES[schedule])):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# After batches of 8 in 4 microbatches, rows of a batch and into how many microbatches it is split, none larger.
COUNTS = {
    "gpipe": {8: 4, 6: 3, 5: 5, 10: 5, 3: 3, 1: 1},
    "1f1b": {8: 4, 6: 3, 5: 5, 10: 5, 3: 3, 1: None},
    "interleaved": {8: 4, 6: 6, 5: None, 10: 10, 3: None, 1: None},
    "1f1b with BatchNorm": {8: 4, 6: 3, 5: None, 10: 5, 1: None},  # which needs two samples at a time
}


def splits(rank: int, world_size: int) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    x, y = make_data(10)
    loss = nn.functional.cross_entropy
    for name, counts in COUNTS.items():
        schedule, _, norm = name.partition(" ")
        calls: list[int] = []
        config = pipe(microbatches=4, schedule=schedule, **SCHEDULES[schedule])
        model = Deep(nn.BatchNorm1d(16)) if norm else None
        engine = make(config, model, criterion=lambda o, t, calls=calls: calls.append(len(t)) or loss(o, t))
        found[name] = {}
        for rows, count in counts.items():
            calls.clear()
            found[name][rows] = said(step, engine, x[:rows], y[:rows])
            if engine.context.is_last_stage and count:
                in_first = [rows] if rows == 8 else []  # where the loss of the whole batch is computed, too
                assert calls == [rows // count] * count + in_first
        engine.close()
    return found


def test_a_batch_that_the_microbatches_do_not_divide():
    for found in run_ranks(splits, 2):
        for name, counts in COUNTS.items():
            for rows, count in counts.items():
                rejected = f"a batch of {rows} samples cannot be split into 4 microbatches"
                assert ("nothing" if count else rejected) in found[name][rows]
        assert "drop_last=True" in found["interleaved"][3]
        assert "2 samples or more in each, which BatchNorm needs" in found["1f1b with BatchNorm"][5]
