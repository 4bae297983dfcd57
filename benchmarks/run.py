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
    "bytes per parameter",
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
        return f"{WORKS[self.work].title.partition(':')[0]}; {self.mode or 'fp32'}{clipped}; {where}"

    @property
    def precision(self) -> str:
        return self.mode.rpartition(" ")[2] or "fp32"


WORKLOADS = ("mlp", "transformer", "vit")
CASES = [
    *(Case(work, mode) for work in WORKLOADS for mode in ("", "TORCH bf16")),
    *(Case(work, "NAIVE bf16", 1.0) for work in WORKLOADS),
    Case("mlp", "", 1.0),
    *(Case(work, "TORCH fp16", 1.0) for work in WORKLOADS),
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

_TITLES = "\n".join("- **{}**:{}.".format(*WORKS[work].title.split(":", 1)) for work in WORKLOADS)
DEFINITIONS = f"""# Benchmarks

How long a step of halfmesh takes compared with a hand-written loop and with other libraries: below 1, halfmesh is
faster. `make bench` writes this page on your machine; [Benchmarks](../docs/benchmarks.md) discusses the figures.

- Each workload trains on one fixed batch: forward, loss, backward, AdamW.
{_TITLES}
- *TORCH* is autocast, with a dynamic loss scale in fp16. *NAIVE* is a bf16 model with fp32 masters. *2 ranks* are two
  processes on this machine, over gloo.
- **The default loop** is the loop one writes by hand with torch's default flags. It uses `torch.amp`, DDP with
  `no_sync()`, ZeroRedundancyOptimizer, `fully_shard`, `parallelize_module` and `torch.distributed.pipelining`. For
  NAIVE it copies each tensor to the masters and back.
- **fused=True** is the same loop with this flag of AdamW, and one call for all copies of NAIVE.
- **Ratios** are halfmesh's time divided by the loop's time in the same round. All contenders share a process and take
  turns. A cell shows the median and the quartiles of the rounds.
- **A/A** is the default loop against itself. Differences below its noise mean nothing.
- **The best peer** is the fastest of accelerate, Lightning Fabric and (with clipping) DeepSpeed, against the default
  loop. Peers that compute another loss or precision are left out. On a CPU, fp16 is forced: accelerate would switch
  to fp32 and Fabric to bf16.
- **Host reads** are tensor values that Python reads in the median step. On a GPU, each waits.
- **Bytes per parameter** are held between steps, and at the peak; the default loop's are in brackets. With several
  ranks they are those of one rank."""
LIMITS = """## What was not measured

- GPUs. CPUs emulate fp16 products slowly, which hides the engine's part of a step in the larger models.
- Several machines, real networks, more than 2 ranks."""


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
