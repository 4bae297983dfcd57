"""The most host memory that a rank needs until the engine stands: of an ordinary build, and of deferred ones.

python -m benchmarks.deferred_memory [--millions 400] [--out benchmarks/results/deferred_memory.md]
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halfmesh

from .harness import on_ranks
from .machine import describe, in_one_line, publish, table

METHOD = """Each rank is a process of its own. *more* is how far its resident memory rose above what it was before the
model was built (`ru_maxrss`, so what was freed again counts, too); *held* is what is left of that at the end; both in
units of the whole model in fp32. malloc gives freed memory back at once (MALLOC_MMAP_THRESHOLD_=65536). Seconds are
those of a machine that had other work, too."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp 2": (2, {"data": "fsdp"}),
    "pp 2": (2, {"pipeline": {"size": 2, "microbatches": 2}}),
    "pp 2 x fsdp 2": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": "fsdp"}),
}
BUILDS = ("ordinary", "deferred")
COLUMNS = ("layout", "build", "more, rank 0", "more, other ranks", "held", "seconds")


def make_model(millions: int) -> nn.Sequential:
    """Layers of 4 million parameters."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(millions // 4)))


def measure(layout: str, build: str, millions: int) -> list[float]:
    """Of a rank: more and held, in units of the model; seconds."""
    logging.getLogger("halfmesh").setLevel(logging.ERROR)
    options: dict[str, Any] = {"config": {"parallel": LAYOUTS[layout][1]}, "device": "cpu"}
    with halfmesh.initialize(make_model(16), torch.optim.AdamW, nn.MSELoss(), **options):
        pass  # what is imported then is not the model's
    before, start = _resident(), time.perf_counter()
    model: Any = make_model(millions) if build == "ordinary" else lambda: make_model(millions)
    engine = halfmesh.initialize(model, torch.optim.AdamW, nn.MSELoss(), **options)
    took, most = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del model
    with torch.device("meta"):
        whole = 4 * sum(param.numel() for param in make_model(millions).parameters())
    held = _resident()
    torch.distributed.barrier()
    del engine
    return [(most - before) / whole, (held - before) / whole, took]


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=400, help="parameters of the model")
    parser.add_argument("--out", type=Path, help="the page (default: print)")
    chosen = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the ranks: or it keeps what tensors gave back
    rows = []
    for layout, (ranks, _) in LAYOUTS.items():
        for build in BUILDS:
            more, held, took = zip(*on_ranks(ranks, measure, layout, build, chosen.millions), strict=True)
            figures = f"{more[0]:.2f}", f"{max(more[1:]):.2f}", f"{max(held):.2f}", f"{max(took):.0f}"
            rows.append([layout, build, *figures])
    publish(
        chosen.out,
        "# Host memory until the engine stands",
        f"`python -m benchmarks.deferred_memory`: {chosen.millions} million parameters in fp32; "
        f"{in_one_line(describe())}.",
        METHOD,
        table(COLUMNS, rows),
    )


if __name__ == "__main__":
    main()
