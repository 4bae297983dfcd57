"""A long run of a tiny model: whether anything grows, and whether ranks stay equal.

python -m benchmarks.soak --out benchmarks/results/soak.md      # 20,000 steps on 2 ranks; `make soak`

NAIVE fp16 with a dynamic loss scale, batches that overflow on one rank only, accumulation, saves in the background,
evaluation. Exits with 1 if something that must hold did not.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import halfmesh

from .harness import on_ranks
from .machine import describe, in_one_line, publish, table

RANKS, WIDTH, ACCUMULATION = 2, 8, 2
BOUNDS = (2.0, 2.0**12)
"""Of the loss scale."""
OVERFLOW = 0.02
"""The part of the steps in which one rank has a batch that overflows."""
COMPARE_EVERY = 50
"""Steps between two comparisons of the ranks."""
SAMPLES = 80
"""How often memory and objects are counted."""
FP16 = {"mode": "naive", "initial_scale": 256.0, "growth_interval": 20, "min_scale": BOUNDS[0], "max_scale": BOUNDS[1]}
GROWTH = {"objects": 200, "threads": 0, "descriptors": 0}
"""Allowed after the warm-up."""
COLUMNS = [
    *("rank", "ms a step", "skipped", "loss, first and last", "memory, MiB, first and last"),
    *("slope, KiB in 1,000 steps", *GROWTH),
]


class Sample(NamedTuple):
    """What a rank held after a step: resident KiB, objects that Python's collector knows, threads, open files."""

    step: int
    kib: float
    objects: int
    threads: int
    descriptors: int

    @classmethod
    def take(cls, step: int) -> Sample:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        kib = pages * os.sysconf("SC_PAGE_SIZE") / 1024
        return cls(step, kib, len(gc.get_objects()), threading.active_count(), len(os.listdir("/proc/self/fd")))


class RankLog(NamedTuple):
    """What one rank saw of the run. `samples` are those after the first fifth, in which caches fill and saves import
    modules."""

    samples: list[Sample]
    violations: list[str]
    injected: int
    skipped: int
    losses: list[float]
    seconds: float


def find_overflow(step: int) -> tuple[int, int] | None:
    """The rank and the microbatch of a step that overflow: the same on all ranks."""
    chance = random.Random(step)
    return None if chance.random() >= OVERFLOW else (chance.randrange(RANKS), chance.randrange(ACCUMULATION))


def make_engine(steps: int) -> halfmesh.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    config = {"fp16": FP16, "gradient_accumulation": ACCUMULATION, "clip_grad_norm": 1.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return halfmesh.initialize(
        model, optimizer, nn.functional.mse_loss, config=config, lr_scheduler=scheduler, device="cpu"
    )


def train(steps: int, folder: str, save_every: int) -> RankLog:
    """What each rank does."""
    logging.getLogger("halfmesh").setLevel(logging.ERROR)
    engine = make_engine(steps)
    rank, injected, skipped = dist.get_rank(), 0, 0
    samples, violations, losses = list[Sample](), list[str](), list[float]()
    numbers = torch.Generator().manual_seed(1 + rank)
    goal = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    results = hashlib.sha256()
    begin = time.monotonic()
    for step in range(1, steps + 1):
        bad = find_overflow(step)
        for micro in range(ACCUMULATION):
            x = torch.randn(4, WIDTH, generator=numbers)
            engine.zero_grad()
            output = engine(x * 1e30 if bad == (rank, micro) else x)
            loss = engine.criterion(output, torch.tanh(x @ goal))
            engine.backward(loss)
            result = engine.step()
        assert result is not None
        injected += bad is not None
        skipped += result.skipped
        if result.skipped != (bad is not None):
            violations.append(f"step {step}: skipped is {result.skipped}, injected {bad}")
        if not BOUNDS[0] <= engine.loss_scale <= BOUNDS[1]:
            violations.append(f"step {step}: the scale is {engine.loss_scale}")
        if bad is None:
            losses.append(loss.item())
        results.update(repr((result.skipped, result.loss_scale, result.grad_norm, result.lr)).encode())
        if step % COMPARE_EVERY == 0 and not _ranks_agree(engine, results.hexdigest()):
            violations.append(f"up to step {step}: verdict, scale, norm, lr or weights differ by rank")
        if step % max(10, steps // SAMPLES) == 0 and step > steps / 5:
            engine.wait_for_save()  # its thread and files are no growth
            samples.append(Sample.take(step))
        if step % save_every == 0:
            engine.save(folder, keep=2, in_background=True)
    engine.wait_for_save()
    seconds = time.monotonic() - begin
    if not math.isfinite(losses[-1]):
        violations.append(f"the last loss is {losses[-1]}")
    there = list(Path(folder).glob("step-*"))
    if len(there) != min(2, steps // save_every):
        violations.append(f"checkpoints are {there}")
    engine.close()
    return RankLog(samples, violations, injected, skipped, losses, seconds)


def _ranks_agree(engine: halfmesh.Engine, results: str) -> bool:
    """Evaluate, and compare results and weights of all ranks."""
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(4, WIDTH))
    engine.train()
    weights = hashlib.sha256()
    for value in engine.model.state_dict().values():
        weights.update(value.numpy().tobytes())
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, (results, weights.hexdigest()))
    return len(set(everyone)) == 1


def slope(samples: Sequence[Sample]) -> tuple[float, float]:
    """KiB for 1,000 steps by least squares, and its standard error (which takes the residuals for independent)."""
    steps, kib = [one.step / 1000 for one in samples], [one.kib for one in samples]
    found = statistics.linear_regression(steps, kib)
    mean = statistics.fmean(steps)
    residuals = sum((y - found.slope * x - found.intercept) ** 2 for x, y in zip(steps, kib, strict=True))
    return found.slope, math.sqrt(residuals / (len(samples) - 2) / sum((x - mean) ** 2 for x in steps))


def find_problems(logs: Sequence[RankLog]) -> list[str]:
    """What did not hold."""
    problems = [f"rank {rank}: {problem}" for rank, log in enumerate(logs) for problem in log.violations]
    for rank, log in enumerate(logs):
        first, last = log.samples[0], log.samples[-1]
        for name, allowed in GROWTH.items():
            grown = getattr(last, name) - getattr(first, name)
            if grown > allowed:
                problems.append(f"rank {rank}: {grown} more {name} than after the warm-up")
        growth, error = slope(log.samples)
        if last.step >= 5000 and growth - 2 * error > 20:  # 400 KiB in 20,000 steps: pages of the allocator's
            problems.append(f"rank {rank}: memory grows by {growth:.1f} KiB in 1,000 steps")
    return problems


def run(steps: int, save_every: int) -> list[RankLog]:
    """What each rank saw."""
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        return on_ranks(RANKS, train, steps, folder, save_every)


def render(logs: Sequence[RankLog], steps: int, save_every: int, problems: Sequence[str]) -> list[str]:
    """The paragraphs of the page."""
    method = (
        f"{steps:,} steps of {ACCUMULATION} microbatches on {RANKS} ranks over gloo, mode NAIVE in fp16, an MLP of "
        f"width {WIDTH}; an overflow on one rank in {logs[0].injected}; every {save_every} a save in the background "
        f"with keep=2; every {COMPARE_EVERY} an evaluation, and a comparison of the ranks' verdicts, scales, norms, "
        "learning rates and weights. What is held is counted after the first fifth of the run; the slope is by least "
        "squares."
    )
    rows = []
    for rank, log in enumerate(logs):
        first, last = log.samples[0], log.samples[-1]
        rows.append(
            [
                rank,
                f"{1000 * log.seconds / steps:.2f}",
                f"{log.skipped} of {log.injected}",
                f"{log.losses[0]:.4f}, {log.losses[-1]:.4f}",
                f"{first.kib / 1024:.1f}, {last.kib / 1024:.1f}",
                "{:.2f} ± {:.2f}".format(*slope(log.samples)),
                *(f"{getattr(first, name):,} to {getattr(last, name):,}" for name in GROWTH),
            ]
        )
    end = "\n".join(["Did not hold:", *(f"- {problem}" for problem in problems)]) if problems else "Everything held."
    about = f"Written by `make soak`: {in_one_line(describe())}."
    return ["# A long run", about, method, table(COLUMNS, rows), end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--out", type=Path, help="where the report goes; without, it is printed")
    chosen = parser.parse_args()
    logs = run(chosen.steps, chosen.save_every)
    problems = find_problems(logs)
    publish(chosen.out, *render(logs, chosen.steps, chosen.save_every, problems))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    from benchmarks import soak  # under its own name, by which the ranks find its classes

    soak.main()
