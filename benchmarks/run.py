"""Steps beside hand-written loops and other engines: one row for each workload, in benchmarks/RESULTS.md.

python -m benchmarks                                    # everything: 15 minutes or so on 2 cores
python -m benchmarks --only MLP ViT --out FILE          # workloads whose names contain one of these
python -m benchmarks --only "1 rank" --seconds 15       # a quick look: prints the table
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
    Makers,
    make_comparable,
    on_ranks,
    ratio,
    rounds_within,
    slowest,
    take_turns,
    time_steps,
)
from .machine import describe, publish, table
from .peers import ACCELERATE, DEEPSPEED, FABRIC, make_accelerate, make_deepspeed, make_fabric
from .works import WORKS

BLOCK_S = 0.1
"""Seconds that a contender is timed for in a round, or one step."""
NOT_MEASURED = "not measured"
COLUMNS = (
    "workload",
    "against the default loop",
    "against fused=True",
    "A/A",
    "best peer",
    "host reads",
    "bytes a parameter",
)


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


def makers(case: Case, setup: Setup) -> Makers:
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


def measure(case: Case, seconds: float) -> tuple[list[str], list[str]]:
    """The cells of a case's row, and notes; times for about `seconds`. Of two ranks each calls this."""
    several = bool(case.layout)
    own_batch = several and layouts.LAYOUTS[case.layout][2]
    seed = 1 + (torch.distributed.get_rank() if own_batch else 0)
    setup = Setup.of(WORKS[case.work], case.precision, case.clip, seed=seed, masters="NAIVE" in case.mode)
    making = makers(case, setup)
    contenders, missing = make_comparable(making, case.precision, setup.work.warm)
    [of_a_step] = slowest([time_steps(contenders[0], 1)])
    steps = max(1, round(BLOCK_S / of_a_step))
    begin = time.perf_counter()
    take_turns(contenders, 1, steps)
    [of_a_round] = slowest([time.perf_counter() - begin])
    rows = take_turns(contenders, rounds_within(seconds, of_a_round), steps)
    for row in rows:
        row.seconds = slowest(row.seconds)
    ours = next(contender for contender in contenders if contender.name == HALFMESH)
    reads = count_reads(ours, 1 if several else 5)
    for contender in contenders:
        contender.close()
    kept = NOT_MEASURED
    if own_batch or not several:  # else a rank has a part of the model only
        ours_kept, loops = (
            "{:.1f}, {:.1f}".format(*count_bytes(dict(making)[name], setup)) for name in (HALFMESH, LOOP)
        )
        kept = f"{ours_kept} ({loops})"
    peers = {row.name: ratio(rows, row.name, LOOP) for row in rows if row.name not in REQUIRED}
    best = min(peers, key=lambda name: peers[name], default=None)
    cells = [
        str(ratio(rows, HALFMESH, LOOP)),
        str(ratio(rows, HALFMESH, FUSED)),
        str(ratio(rows, AGAIN, LOOP)),
        NOT_MEASURED if best is None else f"{best} {peers[best]}",
        f"{reads:g}",
        kept,
    ]
    return cells, [f"{row.name}: {row.missing}" for row in missing]


# -- the page ------------------------------------------------------------------------------------------------------

DEFINITIONS = """# Benchmarks

Written by `make bench`. All rows are of one commit and one machine, see below.

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

- GPUs. CPUs emulate fp16 products, which makes them slow: there the engine's part of a step all but vanishes in the
  larger models.
- Several machines, real networks and more than 2 ranks."""


def render(rows: dict[str, Sequence[str]], machine: dict[str, str], notes: Sequence[str]) -> list[str]:
    """The paragraphs of the page. `rows` are cells by workload."""
    about = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    ordered = [(case.name, *rows[case.name]) for case in CASES if case.name in rows]
    last = "\n".join([LIMITS, *(f"- {note}" for note in sorted(set(notes)))])
    return [DEFINITIONS, about, table(COLUMNS, ordered), last]


def rows_of(page: Path | None, commit: str) -> dict[str, Sequence[str]]:
    """The rows of an existing page, by workload, if it is of this commit."""
    text = page.read_text() if page is not None and page.exists() else ""
    if f"- halfmesh: {commit}\n" not in text:
        return {}
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="workloads whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=25.0, help="that the contenders of a workload are timed for")
    parser.add_argument("--out", type=Path, help="the page; rows that it has of the same commit stay (default: print)")
    chosen = parser.parse_args()
    cases = [case for case in CASES if chosen.only is None or any(text in case.name for text in chosen.only)]
    if not cases:
        parser.error("no workload is named so; there are:\n" + "\n".join(case.name for case in CASES))
    machine, notes = describe(), list[str]()
    rows = rows_of(chosen.out, machine["halfmesh"])
    for number, case in enumerate(cases, 1):
        print(f"{number} of {len(cases)}: {case.name}", flush=True)
        rows[case.name], missing = on_ranks(2 if case.layout else 1, measure, case, chosen.seconds)[0]
        notes += missing
        if chosen.out is not None:  # after each: what was measured is not lost
            publish(chosen.out, *render(rows, machine, notes))
    if chosen.out is None:
        publish(None, *render(rows, machine, notes))


if __name__ == "__main__":
    main()
