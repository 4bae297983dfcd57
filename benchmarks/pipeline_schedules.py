"""How long ranks wait under each schedule, and how much they keep for backward; beside the formulas.

python -m benchmarks.pipeline_schedules [--out benchmarks/results/pipeline_schedules.md]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import halfmesh

from .harness import on_ranks
from .machine import describe, in_one_line, publish, table

METHOD = """A stage's layers sleep for a fixed time in forward, for the gradients of their inputs and for those of their
weights, so that a few cores can play many ranks, and what is measured is the schedule: waiting = 1 - (time
asleep) / (time of `engine.backward`), the median of several steps, averaged over the ranks. What is kept for
backward is counted in bytes by `torch.autograd.graph.saved_tensors_hooks`, and given in microbatches of a
stage."""
READING = """The formulas: w (p - 1) / (v m + w (p - 1)), for p ranks, m microbatches and v chunks; w is 1, and 1/3 for
zero_bubble, 0 for zbv, 2/3 for dualpipev. What is measured is longer by what the formulas leave out: sending,
which interleaved does more often, the loss, and Python.

gpipe keeps all m microbatches; 1f1b at most p - rank; interleaved more than 1f1b, for its shorter wait. The
last rank has the criterion's tensors, too."""

COLUMNS = (
    "ranks",
    "microbatches",
    "schedule",
    "waiting, measured",
    "by the formula",
    "kept by each rank, in microbatches",
)

FORWARD_S = 0.04
LAYERS = 8
"""Of which each rank of a pipeline has as many as any other."""
FEATURES = 64
ROWS = 4
"""Of a microbatch."""
STEPS = 5
CASES = [
    (size, microbatches, schedule, chunks)
    for size in (2, 4)
    for microbatches in (4, 8)
    for schedule, chunks in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("zero_bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    )
    if not any(halfmesh.SCHEDULES.get(schedule).find_problems(size, chunks, microbatches))
]


class _Nap(torch.autograd.Function):
    """Keeps its input, and takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, meter: Meter) -> torch.Tensor:
        ctx.save_for_backward(x.clone())
        ctx.meter = meter
        meter.nap(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _ = ctx.saved_tensors
        ctx.meter.nap(FORWARD_S)
        return grad.clone(), None


class _NapForWeight(torch.autograd.Function):
    """Takes the time of a weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, meter: Meter) -> torch.Tensor:
        ctx.meter = meter
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.meter.nap(FORWARD_S)
        return grad, None


class Layer(nn.Module):
    """`share` of a rank's time, if it has all layers of one."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))
        self.meter = (meter,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nap.apply(x * _NapForWeight.apply(self.weight, self.meter[0]), self.meter[0])


class Meter:
    """Seconds asleep, and bytes that are kept for backward now and at most."""

    def __init__(self) -> None:
        self.asleep = 0.0
        self.share = 1.0
        self.kept = self.most = 0

    def nap(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds * self.share)
        self.asleep += time.perf_counter() - begin

    def keep(self, tensor: torch.Tensor) -> Kept:
        return Kept(self, tensor)

    def __deepcopy__(self, memo: Any) -> Meter:
        silent = Meter()
        silent.share = 0.0
        return silent


class Kept:
    """A tensor that backward needs."""

    def __init__(self, meter: Meter, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._meter = meter
        self._bytes = 0 if tensor.is_leaf and tensor.requires_grad else tensor.numel() * tensor.element_size()
        meter.kept += self._bytes
        meter.most = max(meter.most, meter.kept)

    def __del__(self) -> None:
        self._meter.kept -= self._bytes


def measure(size: int, microbatches: int, schedule: str, chunks: int) -> tuple[float, float]:
    """Of a rank: the part of a step that it waited, and how many microbatches of a stage it kept at most."""
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    torch.manual_seed(0)
    meter = Meter()
    meter.share = size / LAYERS  # all microbatches' forwards take m x FORWARD_S on each rank
    model = nn.Sequential(*(Layer(meter) for _ in range(LAYERS)))
    options = {"size": size, "microbatches": microbatches, "schedule": schedule, "chunks": chunks}
    engine = halfmesh.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda output, target: (output - target).square().mean(),
        config={"parallel": {"pipeline": options}},
        device="cpu",
    )
    x = torch.randn(microbatches * ROWS, FEATURES)
    waiting = []
    for step in range(1 + STEPS):
        engine.zero_grad()
        loss = engine.criterion(engine(x), x)
        dist.barrier()
        meter.asleep, meter.most, begin = 0.0, 0, time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda kept: kept.tensor):
            engine.backward(loss)
        dist.barrier()
        if step:
            waiting.append(1 - meter.asleep / (time.perf_counter() - begin))
        engine.step()
    engine.close()
    # Each layer keeps the product's input and the nap's, of a microbatch.
    of_a_microbatch = LAYERS / size * ROWS * FEATURES * 4 * 2
    return statistics.median(waiting), meter.most / of_a_microbatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page (default: print)")
    out = parser.parse_args().out
    rows = []
    for size, microbatches, schedule, chunks in CASES:
        waiting, kept = zip(*on_ranks(size, measure, size, microbatches, schedule, chunks), strict=True)
        formula = halfmesh.SCHEDULES.get(schedule).bubble(size, chunks, microbatches)
        name = f"{schedule}, {chunks} chunks" if chunks > 1 else schedule
        kept_by_each = ", ".join(f"{microbatches:.1f}" for microbatches in kept)
        rows.append([size, microbatches, name, f"{statistics.mean(waiting):.1%}", f"{formula:.1%}", kept_by_each])
    made = f"Written by `make bench-pipeline`: {in_one_line(describe())}."
    publish(out, "# Schedules of a pipeline", made, METHOD, table(COLUMNS, rows), READING)


if __name__ == "__main__":
    main()
