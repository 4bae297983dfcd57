"""A long run of a tiny model: whether anything grows, and whether ranks stay equal.

python -m benchmarks.soak --out benchmarks/results/soak.md      # 20,000 steps on 2 ranks; `make soak`
python -m benchmarks.soak --steps 200                           # a look

fp16 with a dynamic loss scale, batches with values that overflow on one rank only, accumulation, saving in the
background, evaluation. Exits with 1 if something that must hold did not.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RANKS = 2
WIDTH = 8
ACCUMULATION = 2
BOUNDS = (2.0, 2.0**12)
OVERFLOW = 0.02
"""The part of the steps in which one rank has a batch that overflows."""
COMPARE_EVERY = 50
"""Steps between two comparisons of the ranks."""
LOOKS = 80
"""How often memory and objects are counted."""


@dataclass
class Look:
    """What a rank held after a step."""

    step: int
    kib: int
    objects: int
    threads: int
    descriptors: int


@dataclass
class Course:
    """What one rank saw of the run."""

    looks: list[Look] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    injected: int = 0
    skipped: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    seconds: float = 0.0
    save_every: int = 0


def look(step: int) -> Look:
    """Resident memory (KiB), objects that Python's collector knows, threads, open files of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    kib = pages * os.sysconf("SC_PAGE_SIZE") // 1024
    descriptors = len(os.listdir("/proc/self/fd"))
    return Look(step, kib, len(gc.get_objects()), threading.active_count(), descriptors)


def overflows(step: int) -> tuple[int, int] | None:
    """The rank and the microbatch of a step in which there is an overflow: the same on all ranks."""
    chance = random.Random(step)
    if chance.random() >= OVERFLOW:
        return None
    return chance.randrange(RANKS), chance.randrange(ACCUMULATION)


def train(steps: int, folder: Path, save_every: int) -> Course:
    """What each rank does."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import halfmesh

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    config = {
        "fp16": {
            "mode": "naive",
            "initial_scale": 256.0,
            "growth_interval": 20,
            "min_scale": BOUNDS[0],
            "max_scale": BOUNDS[1],
        },
        "gradient_accumulation": ACCUMULATION,
        "clip_grad_norm": 1.0,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    engine = halfmesh.initialize(
        model, optimizer, nn.functional.mse_loss, config=config, lr_scheduler=scheduler, device="cpu"
    )
    rank, course = engine.context.rank, Course(save_every=save_every)
    numbers = torch.Generator().manual_seed(1 + rank)
    goal = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    digest = hashlib.sha256()
    begin = time.monotonic()
    for step in range(1, steps + 1):
        bad, losses = overflows(step), []
        for micro in range(ACCUMULATION):
            x = torch.randn(4, WIDTH, generator=numbers)
            targets = torch.tanh(x @ goal)
            if bad == (rank, micro):
                x = x * 1e30
            engine.zero_grad()
            loss = engine.criterion(engine(x), targets)
            engine.backward(loss)
            losses.append(loss.item())
            result = engine.step()
        assert result is not None
        course.injected += bad is not None
        course.skipped += result.skipped
        if result.skipped != (bad is not None):
            course.violations.append(f"step {step}: skipped is {result.skipped}, injected {bad}")
        if not BOUNDS[0] <= result.loss_scale <= BOUNDS[1] or not BOUNDS[0] <= engine.loss_scale <= BOUNDS[1]:
            course.violations.append(f"step {step}: the scale is {engine.loss_scale}")
        if bad is None:
            course.last_loss = sum(losses) / len(losses)
            if math.isnan(course.first_loss):
                course.first_loss = course.last_loss
        digest.update(repr((result.skipped, result.loss_scale, result.grad_norm, result.lr)).encode())
        if step % COMPARE_EVERY == 0:
            engine.eval()
            with torch.no_grad():
                engine(torch.ones(4, WIDTH))
            engine.train()
            weights = hashlib.sha256()
            for value in engine.model.state_dict().values():
                weights.update(value.numpy().tobytes())
            everyone: list[Any] = [None] * RANKS
            dist.all_gather_object(everyone, (digest.hexdigest(), weights.hexdigest()))
            if len(set(everyone)) > 1:
                course.violations.append(f"up to step {step}: verdict, scale, norm, lr or weights differ by rank")
        if step % max(10, steps // LOOKS) == 0:
            engine.wait_for_save()  # its thread and files are no growth
            course.looks.append(look(step))
        if step % save_every == 0:
            engine.save(folder, keep=2, in_background=True)
    engine.wait_for_save()
    course.seconds = time.monotonic() - begin
    if engine.skipped_steps != course.injected:
        course.violations.append(f"{engine.skipped_steps} steps are counted as skipped, {course.injected} overflowed")
    if not math.isfinite(course.last_loss):
        course.violations.append(f"the last loss is {course.last_loss}")
    there = sorted(path.name for path in folder.glob("step-*")) if rank == 0 else []
    if rank == 0 and len(there) != min(2, steps // save_every):
        course.violations.append(f"checkpoints are {there}")
    engine.close()
    return course


def slope(looks: Sequence[Look]) -> tuple[float, float]:
    """KiB for 1,000 steps by least squares, and its standard error (which takes the residuals for independent)."""
    steps, kib = [one.step / 1000 for one in looks], [float(one.kib) for one in looks]
    found = statistics.linear_regression(steps, kib)
    mean = statistics.fmean(steps)
    residuals = sum((y - found.slope * x - found.intercept) ** 2 for x, y in zip(steps, kib, strict=True))
    return found.slope, math.sqrt(residuals / (len(looks) - 2) / sum((x - mean) ** 2 for x in steps))


def judge(courses: Sequence[Course]) -> list[str]:
    """What did not hold."""
    problems = [f"rank {rank}: {problem}" for rank, course in enumerate(courses) for problem in course.violations]
    for rank, course in enumerate(courses):
        warm, last = settled(course)[0], course.looks[-1]
        for name, allowed in (("threads", 0), ("descriptors", 0), ("objects", 200)):
            grown = getattr(last, name) - getattr(warm, name)
            if grown > allowed:
                problems.append(f"rank {rank}: {grown} more {name} than after the warm-up")
        growth, error = slope(settled(course))
        if last.step >= 5000 and growth - 2 * error > 20:  # 400 KiB in 20,000 steps: pages of the allocator's
            problems.append(f"rank {rank}: memory grows by {growth:.1f} KiB in 1,000 steps")
    return problems


def settled(course: Course) -> Sequence[Look]:
    """Without the first fifth, in which caches fill, and the first two saves, which import modules and make buffers."""
    looks = course.looks
    return [one for one in looks if one.step > max(looks[-1].step / 5, 2 * course.save_every)]


def render(courses: Sequence[Course], steps: int, about: dict[str, str], problems: Sequence[str]) -> str:
    """The report, in Markdown."""
    lines = [
        "# A long run",
        "",
        "Written by `make soak`.",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
    ]
    lines += [
        "",
        f"{steps:,} steps of {ACCUMULATION} microbatches on {RANKS} ranks over gloo, mode NAIVE in fp16, an MLP of "
        f"width {WIDTH}; an overflow on one rank in {courses[0].injected}; every {courses[0].save_every} a save "
        f"in the background with keep=2; every {COMPARE_EVERY} an evaluation, and a comparison of the ranks' verdicts, "
        "scales, norms, learning rates and weights. Slope: least squares without the first fifth of the run.",
        "",
        "| rank | ms a step | skipped | loss, first and last | memory, MiB, first and last look | "
        "slope, KiB in 1,000 steps | objects | threads | descriptors |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rank, course in enumerate(courses):
        first, last = course.looks[0], course.looks[-1]
        growth, error = slope(settled(course))
        lines.append(
            f"| {rank} | {1000 * course.seconds / steps:.2f} | {course.skipped} of {course.injected} | "
            f"{course.first_loss:.4f}, {course.last_loss:.4f} | {first.kib / 1024:.1f}, {last.kib / 1024:.1f} | "
            f"{growth:.2f} ± {error:.2f} | {first.objects:,} to {last.objects:,} | {first.threads} to {last.threads} | "
            f"{first.descriptors} to {last.descriptors} |"
        )
    lines += ["", "Everything held." if not problems else "Did not hold:", *(f"- {problem}" for problem in problems)]
    return "\n".join(lines) + "\n"


def run(steps: int, save_every: int) -> list[Course]:
    """Start the ranks; what each saw."""
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
            "-m",
            "benchmarks.soak",
        ]
        own = ["--rank-of", folder, "--steps", str(steps), "--save-every", str(save_every)]
        root = Path(__file__).parent.parent
        subprocess.run([sys.executable, *launcher, *own], env=environment, check=True, cwd=root)
        found = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return [Course(**{**one, "looks": [Look(**each) for each in one["looks"]]}) for one in found]


def _as_rank(folder: Path, steps: int, save_every: int) -> None:
    import logging

    logging.getLogger("halfmesh").setLevel(logging.ERROR)
    course = train(steps, folder / "checkpoints", save_every)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(asdict(course)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--out", type=Path, help="where the report goes; without, it is printed")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank_of is not None:
        _as_rank(chosen.rank_of, chosen.steps, chosen.save_every)
        return
    if chosen.save_every < 1 or chosen.steps < 5 * chosen.save_every:
        parser.error("--steps: give at least 5 times --save-every, which is at least 1")
    from .machine import describe

    courses = run(chosen.steps, chosen.save_every)
    problems = judge(courses)
    text = render(courses, chosen.steps, describe(False), problems)
    if chosen.out is None:
        print(text)
    else:
        chosen.out.write_text(text)
        print(f"written: {chosen.out}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
