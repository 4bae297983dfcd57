"""`debug="sync"`: ranks that train alike are left alone, and of others the first thing that differs is named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from halfmesh.errors import SyncError
from tests.support.checkpoint_runs import LAYOUTS, PIPE, TENSOR, make_engine
from tests.support.ranks import run_ranks

MORE = {
    "pp2_dp2": (4, {"pipeline": PIPE}),
    "pp2_tp2": (4, {"pipeline": PIPE, "tensor": TENSOR}),
    "tp2_dp2": (4, {"tensor": TENSOR}),
    "hybrid": (4, {"data": {"strategy": "fsdp", "hybrid": 2}}),
    "tied": (2, {"pipeline": PIPE | {"partition": ("middle",)}}),
}
BF16 = {"bf16": {"mode": "naive"}}


class Tied(nn.Module):
    """A weight in the first and the last stage."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()).tanh())


class Overflows(nn.Module):
    """Cross entropy, at times inf."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        loss = nn.functional.cross_entropy(output, target)
        return loss * math.inf if self.calls % 8 == 5 else loss


def start(layout, mode="none", **config):
    LAYOUTS.update(MORE)
    config = {"model": Tied() if layout == "tied" else None, "clip_grad_norm": 1.0, "on_nonfinite": "skip"} | config
    return make_engine(layout, mode, debug="sync", samples=64, **config)


def train(engine, steps, before=None):
    """`before(engine, x, y)` each batch may do harm, and return another one."""
    done = 0
    while done < steps:
        for x, y in engine.dataloader:
            x, y = (before and before(engine, x, y)) or (x, y)
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            done += 1
            if done == steps:
                break


def clean(rank, world_size, cells):
    """For each cell how many steps were taken and how many of them skipped."""
    found = []
    for layout, mode in cells:
        more = BF16 if mode == "bf16" else {}
        engine = start(
            layout,
            "none" if mode == "bf16" else mode,
            dropout=0.2,
            shuffle=True,
            gradient_accumulation=2 if mode == "torch" else 1,
            **more,
        )
        engine._criterion = Overflows()
        train(engine, 8)
        found.append((engine.global_step, engine.skipped_steps))
        engine.close()
    return found


CELLS = {
    2: [
        *(("dp2", mode) for mode in ("none", "torch", "naive", "bf16")),
        *((layout, mode) for layout in ("tp2", "pp2", "zero1", "fsdp") for mode in ("none", "naive", "torch")),
        *(("tied", mode) for mode in ("none", "bf16")),
    ],
    4: [
        *(("pp2_dp2", mode) for mode in ("none", "bf16")),
        ("pp2_tp2", "none"),
        ("tp2_dp2", "torch"),
        ("hybrid", "bf16"),
        ("tp2_fsdp2", "naive"),
        ("pp2_zero1", "bf16"),
    ],
}


@pytest.mark.parametrize("ranks", CELLS)
def test_training_that_is_alike_on_all_ranks(ranks):
    for found in run_ranks(clean, ranks, CELLS[ranks], timeout=200):
        for cell, (steps, skipped) in zip(CELLS[ranks], found, strict=True):
            assert steps == (4 if cell[1] == "torch" else 8), cell
            assert skipped > 0, cell


# -- harm, on one rank, before the third batch ---------------------------------------------------------------------


def weight(engine, x, y):
    with torch.no_grad():
        engine.model.first.weight[0, 3] += 1e-6


def frozen_weight(engine, x, y):
    with torch.no_grad():
        engine.model.frozen.weight[1, 2] += 1.0


def low_weight(engine, x, y):
    with torch.no_grad():
        engine.model.head.weight[0, 3] += 0.5


def part(engine, x, y):
    shard = next(shard for shard in engine._update.holdings.shards if shard.name == "first.weight")
    with torch.no_grad():
        shard.param[0, 3] += 1e-3


def master(engine, x, y):
    holdings = engine._update.holdings
    shard = next(shard for shard in holdings.shards if shard.name == "first.weight")
    with torch.no_grad():
        holdings.masters[shard.param][0, 3] += 1e-7  # less than the model can show


def tied_weight(engine, x, y):
    with torch.no_grad():
        engine.model.last.weight[0, 3] += 1e-6


def statistics(engine, x, y):
    """After they were averaged."""
    inner = engine._update.step

    def step(*args):
        engine.model.norm.running_mean[5] += 1.0
        return inner(*args)

    engine._update.step = step


def buffer(engine, x, y):
    engine.model.steps[1] = 7.0


def lr(engine, x, y):
    engine.optimizer.param_groups[0]["lr"] = 0.02


def decay(engine, x, y):
    engine.optimizer.param_groups[0]["weight_decay"] = 0.5


def state(engine, x, y):
    target = engine.optimizer.param_groups[0]["params"][0]
    engine.optimizer.state[target]["exp_avg_sq"].view(-1)[3] += 1.0


def scale(engine, x, y):
    engine._update.losses.first.scale.fill_(512.0)


def draw(engine, x, y):
    """After the last dropout, so that nothing else comes of it in this step."""
    engine.model.head.register_forward_hook(lambda *_: (torch.rand(1), None)[1])


def count(engine, x, y):
    engine.global_step += 1


def batch(engine, x, y):
    return x + 1e-3, y


def shape(engine, x, y):
    return x.double(), y


def target(engine, x, y):
    return x, (y + 1) % 4


HARM = [  # layout, options, what is done on which rank, what the message begins with, and says of whom
    ("dp2", {}, weight, 1, "the weight first.weight", "rank 1: differs by 1.0"),
    ("dp2", {}, buffer, 1, None, None),  # each data rank may have its own
    ("dp2", {}, statistics, 1, "the buffer norm.running_mean", "rank 1: differs by "),
    ("dp2", {}, lr, 1, "lr of parameter group 0", "rank 1: 0.02 instead of 0.01"),
    ("dp2", {}, decay, 1, "weight_decay of parameter group 0", "rank 1: 0.5 instead of 0.01"),
    ("dp2", {"lr": 0.0}, state, 1, "the optimizer's exp_avg_sq of first.weight", "at [0, 3]: "),
    ("dp2", {"mode": "naive"}, scale, 1, "scale of the loss scaler", "rank 1: 512.0 instead of 256.0"),
    ("dp2", {"mode": "naive"}, master, 1, "the fp32 master of first.weight", "in 1 of 128 elements, first at [0, 3]"),
    ("dp2", {}, count, 0, "engine.global_step", "rank 1: 3 instead of 4"),
    ("zero1", {}, frozen_weight, 1, "the weight frozen.weight", "rank 1: differs by 1 at most, in 1 of 256 elements"),
    ("fsdp", {}, lr, 1, "lr of parameter group 0", "rank 1: 0.02 instead of 0.01"),
    ("tp2", {}, weight, 1, "the weight first.weight", "rank 1 (tp 1): differs by "),
    ("tp2", {}, buffer, 1, "the buffer steps", "rank 1 (tp 1): differs by 7 at most, in 1 of 3 elements"),
    ("tp2", {"dropout": 0.2}, draw, 1, "the model's random numbers (torch)", "rank 1 (tp 1): differs by"),
    ("tp2", {}, batch, 1, "tensor 0 of the inputs of engine(...)", "rank 1 (tp 1): differs by 0.001"),
    (
        "tp2",
        {},
        shape,
        1,
        "the types and shapes of the tensors in the inputs",
        "[('torch.float64', (8, 8))] instead of",
    ),
    ("tp2", {}, target, 1, "tensor 1 of the arguments of engine.criterion(...)", "in 8 of 8 elements"),
    ("pp2", {}, batch, 0, "tensor 0 of the inputs of engine(...)", "rank 1 (pp 1): differs by 0.001"),
    ("pp2", {}, target, 1, "tensor 0 of the arguments of engine.criterion(...)", "in 8 of 8 elements"),
    ("tied", {}, tied_weight, 1, "the weight first.weight", "rank 1 (pp 1): differs by "),
    ("pp2_tp2", {}, batch, 3, "tensor 0 of the inputs", "rank 3 (pp 1, tp 1): differs by 0.001"),
    ("pp2_dp2", {"mode": "naive"}, low_weight, 3, "the weight head.weight", "rank 3 (pp 1, dp 1): differs by 0.5"),
    ("hybrid", {}, part, 3, "the weight first.weight", "rank 3: differs by 0.00099"),
    ("pp2_dp2", {}, lr, 2, "lr of parameter group 0", "rank 2 (pp 1, dp 0): 0.02 instead of 0.01"),
]


def harmed(rank, world_size, cells):
    """What each rank was told, by cell."""
    found = []
    for layout, options, harm, bad, *_ in cells:
        options = dict(options)
        rate = options.pop("lr", 0.01)
        engine = start(layout, optimizer=lambda params, rate=rate: torch.optim.AdamW(params, lr=rate), **options)
        calls = []

        def before(engine, x, y, calls=calls, harm=harm, bad=bad):
            calls.append(1)
            return harm(engine, x, y) if len(calls) == 3 and rank == bad else None

        try:
            train(engine, 4, before)
            found.append(None)
        except SyncError as error:
            found.append(str(error))
        engine._give_back(whole=False)
        engine.context.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_first_thing_that_differs_is_named_on_all_ranks(ranks):
    LAYOUTS.update(MORE)
    cells = [cell for cell in HARM if LAYOUTS[cell[0]][0] == ranks]
    results = run_ranks(harmed, ranks, cells, timeout=200)
    for cell, *told in zip(cells, *results, strict=True):
        *_, named, said = cell
        assert len(set(told)) == 1, (cell, told)
        if named is None:
            assert told[0] is None, (cell, told)
            continue
        assert told[0] is not None, cell
        assert "after step 2" in told[0].partition("\n")[0], (cell, told[0])
        assert named in told[0].partition("\n")[0], (cell, told[0])
        assert said in told[0], (cell, told[0])
