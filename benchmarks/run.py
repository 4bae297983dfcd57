"""Steps beside hand-written loops and other engines: one row for each workload, in benchmarks/RESULTS.md.

python -m benchmarks                                    # everything: 15 minutes or so on 2 cores
python -m benchmarks --only MLP ViT --out FILE          # workloads whose names contain one of these
python -m benchmarks --only "1 rank" --seconds 15       # a quick look: prints the table
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import layouts
from .contenders import Setup, make_halfmesh, make_loop
from .counts import count_bytes, count_reads
from .harness import (
    AGAIN,
    FUSED,
    HALFMESH,
    LOOP,
    REQUIRED,
    Contender,
    make_comparable,
    ratio,
    rounds_within,
    take_turns,
    time_steps,
)
from .machine import describe
from .peers import ACCELERATE, DEEPSPEED, FABRIC, make_accelerate, make_deepspeed, make_fabric
from .works import WORKS

HERE = Path(__file__).parent
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
BLOCK_S = 0.1
"""Seconds that a contender is timed for in a round, or one step."""


@dataclass(frozen=True)
class Case:
    """A workload. `mode` is "" (fp32), "TORCH bf16", "TORCH fp16" or "NAIVE bf16"; `layout` is one of two ranks."""

    work: str
    mode: str = ""
    clip: float = 0.0
    layout: str = ""

    @property
    def name(self) -> str:
        where = f"2 ranks, {self.layout}" if self.layout else "1 rank"
        clipped = f", clipped at {self.clip:g}" if self.clip else ""
        return f"{WORKS[self.work].title}; {self.mode or 'fp32'}{clipped}; {where}"

    @property
    def precision(self) -> str:
        return self.mode.rpartition(" ")[2] or "fp32"


CASES = [
    *(Case(work, mode) for work in ("mlp", "transformer", "vit") for mode in ("", "TORCH bf16")),
    *(Case(work, "NAIVE bf16", 1.0) for work in ("mlp", "transformer", "vit")),
    Case("mlp", "", 1.0),
    *(Case(work, "TORCH fp16", 1.0) for work in ("mlp", "transformer", "vit")),
    *(Case("transformer", mode, layout="DDP") for mode in ("", "TORCH bf16")),
    *(Case("transformer", layout=layout) for layout in layouts.LAYOUTS if layout != "DDP"),
]


def makers(case: Case, setup: Setup) -> list[tuple[str, Callable[[], Contender]]]:
    """All contenders of a case, the default loop first. No peer has masters of bf16 weights on a CPU."""
    if case.layout:
        return layouts.makers(case.layout, setup)
    peers = {ACCELERATE: make_accelerate, FABRIC: make_fabric} | ({DEEPSPEED: make_deepspeed} if case.clip else {})
    return [
        (LOOP, lambda: make_loop(setup)),
        (AGAIN, lambda: make_loop(setup, AGAIN)),
        (FUSED, lambda: make_loop(setup, FUSED, fused=True)),
        (HALFMESH, lambda: make_halfmesh(setup)),
        *((name, partial(make, setup)) for name, make in peers.items() if not setup.masters),
    ]


def measure(case: Case, seconds: float, clock: str) -> dict[str, str]:
    """The cells of a case's row, by column, and notes; times for about `seconds`. Of two ranks each calls this."""
    torch.set_num_threads(1)
    work, several = WORKS[case.work], bool(case.layout)
    own_batch = several and layouts.LAYOUTS[case.layout][2]
    seed = 1 + (torch.distributed.get_rank() if own_batch else 0)
    setup = Setup.of(work, case.precision, case.clip, seed=seed, masters="NAIVE" in case.mode)
    making = makers(case, setup)
    contenders, missing = make_comparable(making, case.precision, work.warm)
    time_one = layouts.time_after_barrier if several else partial(time_steps, clock=CLOCKS[clock])
    agree = layouts.slowest if several else list
    if several:
        layouts.check_same(missing)
    [of_a_step] = agree([time_one(contenders[0], 1)])
    steps = max(1, round(BLOCK_S / of_a_step))
    begin = time.perf_counter()
    take_turns(contenders, 1, steps, time_one)
    [of_a_round] = agree([time.perf_counter() - begin])
    rows = take_turns(contenders, rounds_within(seconds, of_a_round), steps, time_one)
    for row in rows:
        row.wall = agree(row.wall)
    ours = next(contender for contender in contenders if contender.name == HALFMESH)
    reads = count_reads(ours, 1 if several else 5)
    for contender in contenders:
        contender.close()
    counted = (LOOP, HALFMESH) if own_batch or not several else ()  # else a rank has a part of the model only
    kept = {name: count_bytes(make, [setup.x, setup.y]) for name, make in making if name in counted}
    cells = {name: "{:.1f}, {:.1f}".format(*found) for name, found in kept.items()}
    peers = {row.name: ratio(rows, row.name, LOOP) for row in rows if row.name not in REQUIRED}
    best = min(peers, key=lambda name: peers[name].median, default=None)
    return {
        "against the default loop": str(ratio(rows, HALFMESH, LOOP)),
        "against fused=True": str(ratio(rows, HALFMESH, FUSED)),
        "A/A": str(ratio(rows, AGAIN, LOOP)),
        "best peer": "-" if best is None else f"{best} {peers[best]}",
        "host reads": f"{reads:g}",
        "bytes a parameter": f"{cells[HALFMESH]} ({cells[LOOP]})" if cells else "-",
        "notes": "; ".join(f"{row.name} was not measured: {row.missing}" for row in missing),
    }


def measure_alone(case: Case, seconds: float, clock: str) -> dict[str, str]:
    """`measure` in a fresh process: what one engine leaves in a process would change the next measurement."""
    code = "from benchmarks.run import *; import sys, json; print(json.dumps(one(*json.loads(sys.argv[1]))))"
    arguments = json.dumps([case.work, case.mode, case.clip, case.layout, seconds, clock])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE.parent)]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code, arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"against the default loop": "failed", "notes": f"{case.name} failed"}
    cells: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return cells


def one(work: str, mode: str, clip: float, layout: str, seconds: float, clock: str = "wall") -> dict[str, str]:
    """What each of those processes does."""
    given = Case(work, mode, clip, layout), seconds, clock
    cells: dict[str, str] = layouts.on_ranks(measure, *given) if layout else measure(*given)
    return cells


# -- the page ------------------------------------------------------------------------------------------------------

COLUMNS = (
    "workload",
    "against the default loop",
    "against fused=True",
    "A/A",
    "best peer",
    "host reads",
    "bytes a parameter",
)
DEFINITIONS = """# Benchmarks

Written by `make bench`; all rows are of one commit.

- **A workload** is training steps of one fixed batch: forward, loss, backward, AdamW. *TORCH* is autocast, in fp16 with
  a dynamic loss scale; *NAIVE* is a model in bf16 with fp32 masters. *2 ranks* are two processes on this machine, over
  gloo.
- **The default loop** is what one would write by hand, with torch's default flags: `torch.amp`, DistributedDataParallel
  (with `no_sync()`), ZeroRedundancyOptimizer, `fully_shard`, `parallelize_module`, `torch.distributed.pipelining`; for
  NAIVE a copy to masters and back for each tensor. On a CPU such an AdamW steps one tensor after the other.
- **fused=True** is the same loop with that flag of AdamW, and for NAIVE one call that copies all tensors.
- **Ratios** are halfmesh's time over that of the loop: below 1 halfmesh is faster. All contenders live in one process
  and take turns; each time is divided by the loop's *in the same round*. The median of the rounds, and in brackets the
  quartiles.
- **A/A** is the default loop a second time, against itself: the noise. Smaller differences mean nothing.
- **The best peer** is the fastest of accelerate, Lightning Fabric and (with clipping) DeepSpeed, against the default
  loop. All of them compute the same loss in the same precision, or are left out. On a CPU fp16 is forced: by itself
  accelerate changes it to fp32, and Fabric to bf16.
- **Host reads** are values of tensors that Python gets in the median step of halfmesh; on a GPU each waits for it.
- **Bytes a parameter** are held after a step (weights, gradients, masters, optimizer state), and at the peak within one
  (activations, too); in brackets the default loop's. Of several ranks, on one of them."""
LIMITS = """## What was not measured

- GPUs: see [gpu.md](results/gpu.md). CPUs emulate fp16 products, which makes them slow: there the engine's part of a
  step all but vanishes in the larger models.
- Several machines, real networks and more than 2 ranks."""


def render(rows: dict[str, str], machine: dict[str, str], notes: list[str]) -> str:
    """The page. `rows` are lines of the table, by workload."""
    heading = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    about = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    ordered = [rows[case.name] for case in CASES if case.name in rows]
    last = "\n".join([LIMITS, *(f"- {note}" for note in sorted(set(notes)))])
    return "\n\n".join([DEFINITIONS, "\n".join([*heading, *ordered]), about, last]) + "\n"


def rows_of(page: str, commit: str) -> dict[str, str]:
    """The rows of an existing page, by workload, if it is of this commit."""
    if f"- halfmesh: {commit}\n" not in page:
        return {}
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="workloads whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=25.0, help="that the contenders of a workload are timed for")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="of one rank: processor time, where others use the machine",
    )
    parser.add_argument("--out", type=Path, help="the page; rows that it has of the same commit stay (default: print)")
    chosen = parser.parse_args()
    cases = [case for case in CASES if chosen.only is None or any(text in case.name for text in chosen.only)]
    if not cases:
        parser.error("no workload is named so; there are:\n" + "\n".join(case.name for case in CASES))
    machine = describe() | {"clock": f"{chosen.clock} time; of 2 ranks wall time"}
    notes: list[str] = []
    there = chosen.out.read_text() if chosen.out is not None and chosen.out.exists() else ""
    rows = rows_of(there, machine["halfmesh"])
    for case in cases:
        begin = time.monotonic()
        cells: dict[str, Any] = measure_alone(case, chosen.seconds, chosen.clock)
        notes += filter(None, [cells["notes"]])
        rows[case.name] = f"| {' | '.join([case.name, *(cells.get(column, '') for column in COLUMNS[1:])])} |"
        print(f"{rows[case.name]}  ({time.monotonic() - begin:.0f} s)", flush=True)
        if chosen.out is not None:  # after each: what was measured is not lost
            chosen.out.write_text(render(rows, machine, notes))


if __name__ == "__main__":
    main()
