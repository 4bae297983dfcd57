"""A long run of a tiny model: whether anything grows, and whether ranks stay equal.

python -m benchmarks.soak --out benchmarks/results/soak.md      # 20,000 steps on 2 ranks; `make soak`
python -m benchmarks.soak --steps 5000 --save-every 100

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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import halfmesh

from .layouts import RANKS, on_ranks
from .machine import describe

WIDTH = 8
ACCUMULATION = 2
BOUNDS = (2.0, 2.0**12)
"""Of the loss scale."""
OVERFLOW = 0.02
"""The part of the steps in which one rank has a batch that overflows."""
COMPARE_EVERY = 50
"""Steps between two comparisons of the ranks."""
SAMPLES = 80
"""How often memory and objects are counted."""
FP16 = {"mode": "naive", "initial_scale": 256.0, "growth_interval": 20, "min_scale": BOUNDS[0], "max_scale": BOUNDS[1]}


@dataclass
class Sample:
    """What a rank held after a step: resident KiB, objects that Python's collector knows, threads, open files."""

    step: int
    kib: int
    objects: int
    threads: int
    descriptors: int


@dataclass
class RankLog:
    """What one rank saw of the run."""

    samples: list[Sample] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    injected: int = 0
    skipped: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    seconds: float = 0.0
    save_every: int = 0


def sample(step: int) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    kib = pages * os.sysconf("SC_PAGE_SIZE") // 1024
    return Sample(step, kib, len(gc.get_objects()), threading.active_count(), len(os.listdir("/proc/self/fd")))


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


def train(steps: int, folder: Path, save_every: int) -> RankLog:
    """What each rank does."""
    logging.getLogger("halfmesh").setLevel(logging.ERROR)
    engine = make_engine(steps)
    rank, log = dist.get_rank(), RankLog(save_every=save_every)
    numbers = torch.Generator().manual_seed(1 + rank)
    goal = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    results = hashlib.sha256()
    begin = time.monotonic()
    for step in range(1, steps + 1):
        bad, losses = find_overflow(step), []
        for micro in range(ACCUMULATION):
            x = torch.randn(4, WIDTH, generator=numbers)
            targets = torch.tanh(x @ goal)
            engine.zero_grad()
            loss = engine.criterion(engine(x * 1e30 if bad == (rank, micro) else x), targets)
            engine.backward(loss)
            losses.append(loss.item())
            result = engine.step()
        assert result is not None
        log.injected += bad is not None
        log.skipped += result.skipped
        if result.skipped != (bad is not None):
            log.violations.append(f"step {step}: skipped is {result.skipped}, injected {bad}")
        if not BOUNDS[0] <= result.loss_scale <= BOUNDS[1] or not BOUNDS[0] <= engine.loss_scale <= BOUNDS[1]:
            log.violations.append(f"step {step}: the scale is {engine.loss_scale}")
        if bad is None:
            log.last_loss = sum(losses) / len(losses)
            log.first_loss = log.last_loss if math.isnan(log.first_loss) else log.first_loss
        results.update(repr((result.skipped, result.loss_scale, result.grad_norm, result.lr)).encode())
        if step % COMPARE_EVERY == 0 and not _ranks_agree(engine, results.hexdigest()):
            log.violations.append(f"up to step {step}: verdict, scale, norm, lr or weights differ by rank")
        if step % max(10, steps // SAMPLES) == 0:
            engine.wait_for_save()  # its thread and files are no growth
            log.samples.append(sample(step))
        if step % save_every == 0:
            engine.save(folder, keep=2, in_background=True)
    engine.wait_for_save()
    log.seconds = time.monotonic() - begin
    if engine.skipped_steps != log.injected:
        log.violations.append(f"{engine.skipped_steps} steps are counted as skipped, {log.injected} overflowed")
    if not math.isfinite(log.last_loss):
        log.violations.append(f"the last loss is {log.last_loss}")
    there = sorted(path.name for path in folder.glob("step-*")) if rank == 0 else []
    if rank == 0 and len(there) != min(2, steps // save_every):
        log.violations.append(f"checkpoints are {there}")
    engine.close()
    return log


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
    steps, kib = [one.step / 1000 for one in samples], [float(one.kib) for one in samples]
    found = statistics.linear_regression(steps, kib)
    mean = statistics.fmean(steps)
    residuals = sum((y - found.slope * x - found.intercept) ** 2 for x, y in zip(steps, kib, strict=True))
    return found.slope, math.sqrt(residuals / (len(samples) - 2) / sum((x - mean) ** 2 for x in steps))


def find_problems(logs: Sequence[RankLog]) -> list[str]:
    """What did not hold."""
    problems = [f"rank {rank}: {problem}" for rank, log in enumerate(logs) for problem in log.violations]
    for rank, log in enumerate(logs):
        warm, last = settled(log)[0], log.samples[-1]
        for name, allowed in (("threads", 0), ("descriptors", 0), ("objects", 200)):
            grown = getattr(last, name) - getattr(warm, name)
            if grown > allowed:
                problems.append(f"rank {rank}: {grown} more {name} than after the warm-up")
        growth, error = slope(settled(log))
        if last.step >= 5000 and growth - 2 * error > 20:  # 400 KiB in 20,000 steps: pages of the allocator's
            problems.append(f"rank {rank}: memory grows by {growth:.1f} KiB in 1,000 steps")
    return problems


def settled(log: RankLog) -> Sequence[Sample]:
    """Without the first fifth, in which caches fill, and the first two saves, which import modules and make buffers."""
    return [one for one in log.samples if one.step > max(log.samples[-1].step / 5, 2 * log.save_every)]


def render(logs: Sequence[RankLog], steps: int, machine: dict[str, str], problems: Sequence[str]) -> str:
    """The report, in Markdown."""
    about = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    method = (
        f"{steps:,} steps of {ACCUMULATION} microbatches on {RANKS} ranks over gloo, mode NAIVE in fp16, an MLP of "
        f"width {WIDTH}; an overflow on one rank in {logs[0].injected}; every {logs[0].save_every} a save in the "
        f"background with keep=2; every {COMPARE_EVERY} an evaluation, and a comparison of the ranks' verdicts, "
        "scales, norms, learning rates and weights. Slope: least squares without the first fifth of the run."
    )
    lines = [
        "| rank | ms a step | skipped | loss, first and last | memory, MiB, first and last | "
        "slope, KiB in 1,000 steps | objects | threads | descriptors |",
        "|---" * 9 + "|",
    ]
    for rank, log in enumerate(logs):
        first, last = log.samples[0], log.samples[-1]
        cells = [str(rank), f"{1000 * log.seconds / steps:.2f}", f"{log.skipped} of {log.injected}"]
        cells += [f"{log.first_loss:.4f}, {log.last_loss:.4f}", f"{first.kib / 1024:.1f}, {last.kib / 1024:.1f}"]
        cells += ["{:.2f} ± {:.2f}".format(*slope(settled(log)))]
        cells += [
            f"{getattr(first, name):,} to {getattr(last, name):,}" for name in ("objects", "threads", "descriptors")
        ]
        lines.append(f"| {' | '.join(cells)} |")
    end = "\n".join(["Did not hold:", *(f"- {problem}" for problem in problems)]) if problems else "Everything held."
    return "\n\n".join(["# A long run", "Written by `make soak`.", about, method, "\n".join(lines), end]) + "\n"


def run(steps: int, save_every: int) -> list[RankLog]:
    """Start the ranks; what each saw."""
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        return on_ranks(partial(train_and_gather, steps, Path(folder) / "checkpoints", save_every))


def train_and_gather(steps: int, folder: Path, save_every: int) -> list[RankLog]:
    logs: list[Any] = [None] * RANKS
    dist.all_gather_object(logs, train(steps, folder, save_every))
    return logs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--out", type=Path, help="where the report goes; without, it is printed")
    chosen = parser.parse_args()
    if chosen.save_every < 1 or chosen.steps < 5 * chosen.save_every:
        parser.error("--steps: give at least 5 times --save-every, which is at least 1")
    logs = run(chosen.steps, chosen.save_every)
    problems = find_problems(logs)
    text = render(logs, chosen.steps, describe(), problems)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    from benchmarks import soak  # under its own name, by which the ranks find it

    soak.main()
