"""Works of two processes: data, tensor and pipeline parallelism, each beside what torch has for it by hand.

All contenders live in the same processes. The order of a round is the same on all ranks, a barrier is before each timed
block, and the time of a block is that of the slowest rank.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .contenders import Setup
from .counts import count_calls, count_memory, count_ops
from .harness import Contender, Result, Row, take_turns, time_block
from .layouts import DATA, FSDP, PIPELINE, TENSOR, ZERO, LayoutFactory
from .single import close, fair
from .works import WORKS

RANKS = 2
STEPS = 4


@dataclass(frozen=True)
class Layout:
    """A way to use several processes, and who is measured in it.

    Attributes:
        makers: contenders by name, the hand-written loop first.
        options: what is given to each of them.
        batches: "own" if every rank has its own batch, "shared" if they compute one together.
        memory: whether bytes are counted; of a divided model a rank has only a part.
    """

    title: str
    makers: Sequence[tuple[str, LayoutFactory]]
    options: dict[str, Any]
    batches: str = "shared"
    memory: bool = False


LAYOUTS = {
    "dp2": Layout("data parallel 2, transformer", DATA, {"accumulation": 1}, "own", memory=True),
    "dp2_accumulation4": Layout(
        "data parallel 2, transformer, 4 batches an update", DATA, {"accumulation": 4}, "own", memory=True
    ),
    "zero1_2": Layout("zero1 over 2 data ranks, transformer", ZERO, {}, "own", memory=True),
    "fsdp_2": Layout("fsdp over 2 data ranks, transformer", FSDP, {}, "own", memory=True),
    "tensor2": Layout("tensor parallel 2, transformer", TENSOR, {}),
    "pipeline2": Layout("pipeline of 2 stages, transformer, 4 microbatches, 1F1B", PIPELINE, {"microbatches": 4}),
}


def measure(name: str, precision: str, rounds: int, quick: bool = False) -> Result:
    """One layout in one precision, in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        mp.spawn(_rank, (name, precision, rounds, quick, folder), nprocs=RANKS)
        result: Result = torch.load(f"{folder}/result", weights_only=False)
    return result


def _rank(rank: int, name: str, precision: str, rounds: int, quick: bool, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    # accelerate knows a run of several processes by these.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}
    result = _measure(rank, name, precision, rounds, quick)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def _measure(rank: int, name: str, precision: str, rounds: int, quick: bool) -> Result:
    layout, work = LAYOUTS[name], WORKS["transformer"]
    setup = Setup.of(work, precision, seed=1 + (rank if layout.batches == "own" else 0))
    makers: list[tuple[str, Callable[[], Contender]]] = [
        (label, lambda make=make: make(setup, **layout.options))  # type: ignore[misc]
        for label, make in layout.makers
    ]
    contenders, rows = fair(makers, precision, work.warm)
    agreed: list[Any] = [None] * RANKS
    dist.all_gather_object(agreed, [row.missing for row in rows])
    if any(other != agreed[0] for other in agreed):
        raise RuntimeError(f"the ranks do not measure the same contenders: {agreed}")
    steps = max(1, STEPS // layout.options.get("accumulation", 1) // (2 if quick else 1))
    timed = take_turns(contenders, rounds, steps, after_a_barrier)
    for row, contender in zip(timed, contenders, strict=True):
        place = next(known for known in rows if known.name == row.name)
        place.wall, place.cpu = slowest(row.wall), slowest(row.cpu)
        place.counts = {"Python calls": count_calls(contender, 2)} | count_ops(contender, 1)
    for contender in contenders:
        close(contender)
    if layout.memory:
        _count_memory(rows, makers, setup)
    for row in rows:
        row.counts = _most(row.counts)
    return Result(name, layout.title, precision, rows, steps=steps, ranks=RANKS, group="layouts")


def after_a_barrier(contender: Contender, steps: int) -> tuple[float, float]:
    dist.barrier()
    return time_block(contender, steps)


def _count_memory(rows: Sequence[Row], makers: Sequence[tuple[str, Callable[[], Contender]]], setup: Setup) -> None:
    for row, (_, make) in zip(rows, makers, strict=True):
        if not row.missing:
            row.counts |= count_memory(make, [setup.x, setup.y])


def slowest(seconds: list[float]) -> list[float]:
    """Of each round the largest of all ranks."""
    everyone = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    return everyone.tolist()


def _most(counts: dict[str, float]) -> dict[str, float]:
    values = slowest(list(counts.values())) if counts else []
    return dict(zip(counts, values, strict=True))
