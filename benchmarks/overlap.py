"""What of a step's communication is under way while a rank computes: bytes, counted, and what of the wait that hides.

python -m benchmarks.overlap [--counts] [--out benchmarks/results/overlap.md]
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .contenders import Setup
from .counts import tensor_bytes
from .distributed import after_a_barrier, slowest
from .harness import Result, take_turns
from .layouts import SERIAL, make_halfmesh_sharded
from .works import Work

RANKS = 2
ROUNDS = 9
WIDTH, DEPTH = 1024, 16
"""64 MiB of weights: more than two buckets of 25 MiB, and an update that is taken in several parts."""

_METHOD = f"""{DEPTH} linear layers of {WIDTH} features, AdamW, {RANKS} ranks, gloo. *Reduced*: bytes that a rank gives
in a step to collectives which sum gradients, and how many of them were on their way before the last matrix product of
backward. *Gathered*: the same of new weights, and how many were on their way before the last part of the update was
stepped. These are counts: they are the same in each run."""
_TIMES = """*Time*: of a step, over that of the row that overlaps nothing, in the same round: the median, and in
brackets the quartiles. The row A/A is that one again: what it differs from 1 is noise. While a rank sends here, another
needs the core, so that little can be hidden on few cores."""

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
STEPPING = ("aten::_fused_adam",)
REDUCING = ("allreduce", "_reduce_scatter_base", "reduce_scatter")
GATHERING = ("_allgather_base", "allgather", "broadcast")


@dataclass(frozen=True)
class Overlap:
    """Bytes of one step on one rank."""

    reduced: int
    reduced_early: int
    gathered: int
    gathered_early: int


class Order(TorchDispatchMode):
    """In which order a rank computes and sends. (Backward runs in the thread that calls it, on a CPU.)"""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        operation = name.partition("::")[2]
        if name.startswith(PRODUCTS):
            self._events.append(("product", 0))
        elif name.startswith(STEPPING):
            self._events.append(("step", 0))
        elif name.startswith("c10d::") and operation.startswith(REDUCING):
            self._events.append(("reduce", tensor_bytes(args[1] if operation.startswith("_") else args[0])))
        elif name.startswith("c10d::") and operation.startswith(GATHERING):
            self._events.append(("gather", tensor_bytes(args[0])))
        return func(*args, **(kwargs or {}))

    def count(self) -> Overlap:
        """What was under way when. Numbers that the ranks only tell each other (a norm, a flag) are left out."""
        events = [(kind, size) for kind, size in self._events if size > 4096 or kind in ("product", "step")]
        kinds = [kind for kind, _ in events]
        last_product = max(place for place, kind in enumerate(kinds) if kind == "product")
        last_step = max(place for place, kind in enumerate(kinds) if kind == "step")

        def add(wanted: str, begin: int, end: int) -> int:
            return sum(size for kind, size in events[begin:end] if kind == wanted)

        return Overlap(
            add("reduce", 0, len(events)),
            add("reduce", 0, last_product),
            add("gather", last_product, len(events)),
            add("gather", last_product, last_step),
        )


def make_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, WIDTH), torch.randn(64, WIDTH)


WORK = Work("layers", "linear layers", make_model, samples, nn.functional.mse_loss, {"fp32": 1})
ROWS: list[tuple[str, dict[str, Any]]] = [
    (SERIAL, {"strategy": "zero1", "bucket_mb": 5.0, "overlap": False}),
    (f"{SERIAL} (A/A)", {"strategy": "zero1", "bucket_mb": 5.0, "overlap": False}),
    ("zero1, buckets of 5 MiB", {"strategy": "zero1", "bucket_mb": 5.0}),
    ("zero1, buckets of 25 MiB", {"strategy": "zero1", "bucket_mb": 25.0}),
    ("replicate, buckets of 25 MiB", {"strategy": "replicate", "bucket_mb": 25.0}),
]
"""The first is what the others are compared with."""


def measure(rank: int, rounds: int) -> tuple[list[Overlap], Result | None]:
    """What each row overlaps, and its times, if there are `rounds`."""
    setup = Setup.of(WORK, "fp32", seed=1 + rank)
    contenders = [make_halfmesh_sharded(setup, name=name, **options) for name, options in ROWS]
    overlaps = []
    for contender in contenders:
        contender.run(2)  # the first step makes the optimizer's state
        with Order() as order:
            contender.step()
        overlaps.append(order.count())
    timed = None
    if rounds:
        timed = Result("overlap", "", "fp32", take_turns(contenders, rounds, 1, after_a_barrier), ranks=RANKS)
        for row in timed.rows:
            row.wall = slowest(row.wall)
    return overlaps, timed


def run(rank: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{folder}/store")
    found = measure(rank, rounds)
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


def table(overlaps: Sequence[Overlap], timed: Result | None) -> str:
    lines = ["| | reduced | of it early | gathered | of it early |" + (" time |" if timed else "")]
    lines.append("|---" * (6 if timed else 5) + "|")
    for (name, _), one in zip(ROWS, overlaps, strict=True):
        cells = [name, _mib(one.reduced), _part(one.reduced_early, one.reduced)]
        cells += [_mib(one.gathered), _part(one.gathered_early, one.gathered)]
        cells += [str(timed.ratios(name))] if timed else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _part(some: int, of: int) -> str:
    return f"{_mib(some)}, {some / of:.0%}" if of else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", action="store_true", help="count only: for a machine that is busy")
    parser.add_argument("--out", type=Path, help="write the table here, too")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overlap_") as folder:
        mp.spawn(run, (0 if chosen.counts else ROUNDS, folder), nprocs=RANKS)
        overlaps, timed = torch.load(f"{folder}/found", weights_only=False)
    where = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {datetime.date.today()}"
    parts = [f"Written by `make bench-overlap`: {where}.", _METHOD, *([] if chosen.counts else [_TIMES])]
    text = "\n\n".join(["# What communication is under way while ranks compute", *parts, table(overlaps, timed)]) + "\n"
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text)


if __name__ == "__main__":
    main()
