"""A run of any size, simulated on one machine: the memory and the communication of each kind of rank."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from itertools import islice
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.composition import Setup
from ..engine.parallelize import make_plans
from ..errors import ConfigError, HalfmeshError
from ..parallel.dims import ParallelDims
from ..parallel.registries import DATA_STRATEGIES, SCHEDULES
from .simulate_rank import Figures, simulate_rank
from .tracker import Traffic

if TYPE_CHECKING:
    from ..config import Config
    from ..config.schema import PipelineConfig

MOST_KINDS = 3
"""Ranks that are simulated: on the first, a middle and the last stage. The ranks of a stage are equal."""

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or that of a pool of processes."""


@dataclass
class DryRun:
    """The memory and communication that a run would need.

    Attributes:
        dims: the mesh.
        problems: the reasons why it cannot run; empty if it can.
        ranks: the figures of ranks of the first, middle and last stage, by rank.
        bubble: the fraction of a step in which a rank of the pipeline waits.
        extrapolated: None if all microbatches were simulated, else the two numbers of microbatches that were.
        notes: costs that are not counted.
    """

    dims: ParallelDims
    problems: list[str] = field(default_factory=list)
    ranks: dict[int, Figures] = field(default_factory=dict)
    bubble: float = 0.0
    extrapolated: tuple[int, ...] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def largest(self) -> tuple[int, Figures]:
        """The rank that needs the most memory, and its figures."""
        return max(self.ranks.items(), key=lambda item: item[1].needed)

    @property
    def rows(self) -> int:
        """The rows of a data rank's batch; 0 if not known."""
        return next((figures.rows for figures in self.ranks.values()), 0)

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of `rank`."""
        return rank // (self.dims.world_size // self.dims.pp)


def dry_runs(
    over: Map,
    wanted: Sequence[tuple[Config, int | None]],
    world_size: int,
    model: str,
    batch: tuple[str, ...] = (),
    limit: int | None = None,
) -> list[DryRun]:
    """Simulate one update with AdamW of configs that pass `compat.check`, in parallel.

    Args:
        over: see `workers`.
        wanted: configs, each with the rows of its batch (None: those of the inputs).
        model: "package.module:build", see `build_model`.
        batch: shapes of the model's inputs, instead of those that `build` returns.
        limit: see `simulate_rank`.
    """
    jobs = [
        (config, model, batch, rank, world_size, count, rows, limit)
        for config, rows in wanted
        for rank in _kinds(config, world_size)
        for count in choose_counts(config.parallel.pipeline)
    ]
    results = iter(over(_try_to_simulate, jobs))
    return [_collect(config, world_size, results) for config, _ in wanted]


def _kinds(config: Config, world_size: int) -> list[int]:
    """The ranks to simulate: one of each kind."""
    size = config.parallel.pipeline.size
    return [stage * (world_size // size) for stage in sorted({0, size // 2, size - 1})]  # MOST_KINDS


def _collect(config: Config, world_size: int, results: Iterator[Figures | list[str]]) -> DryRun:
    """The dry run of `config`, from the next of `results`."""
    pipeline, run = config.parallel.pipeline, DryRun(config.parallel.dims(world_size))
    wanted, counts = pipeline.microbatches or 1, choose_counts(pipeline)
    if pipeline.size > 1:
        run.bubble = SCHEDULES.get(pipeline.schedule).bubble(pipeline.size, pipeline.chunks, wanted)
    run.extrapolated = counts if len(counts) > 1 else None
    for rank in _kinds(config, world_size):
        found = list(islice(results, len(counts)))
        run.problems += [problem for one in found if isinstance(one, list) for problem in one]
        if not run.problems:
            run.ranks[rank] = extrapolate([one for one in found if isinstance(one, Figures)], counts, wanted)
    run.problems = list(dict.fromkeys(run.problems))
    if config.compile.enabled:
        run.notes.append("the simulation does not compile; compiled code needs less memory than counted here")
    data = config.parallel.data
    if DATA_STRATEGIES.get(data.strategy).steps_on_host(data) or config.activation_offload:
        run.notes.append("the simulation counts offloaded tensors as if they were on the device")
    if not run.problems and not run.rows:
        run.notes.append(
            "the model's inputs are not known, so activations, communication and the peak are missing: give "
            "--batch, or return (model, inputs) from build()"
        )
    return run


def find_plan_problems(config: Config, world_size: int, model: nn.Module) -> list[str]:
    """The reasons why `model`, which was built in a dry run, cannot be sharded by `config`."""
    try:
        make_plans(model, torch.optim.AdamW(model.parameters()), None, None, Setup.of(config, world_size))
    except Exception as error:
        return [str(error)] if type(error) is ValueError else _problems_of(error)  # torch's: without parameters
    return []


def choose_counts(pipeline: PipelineConfig) -> tuple[int, ...]:
    """Two numbers of microbatches to extrapolate from; one, the config's, if running all of them is as cheap.

    Beyond the most that the schedule has in flight on a rank, each further microbatch adds the same.
    """
    size, wanted = pipeline.size, pipeline.microbatches or 0
    if size == 1:
        return (wanted,)
    schedule = SCHEDULES.get(pipeline.schedule)
    # One more than are in flight on the first rank: then forwards run with gradients in memory. An interleaved schedule
    # has up to 2 (p - 1) + (v - 1) p forwards of stages in flight, of which a microbatch has v; one that runs the
    # gradients of weights later keeps activations longer.
    least = {"gpipe": 2}.get(pipeline.schedule, 3 * size if pipeline.chunks > 1 else size + 1)
    least += size * schedule.splits_backward
    fitting = (n for n in range(least, wanted) if not any(schedule.find_problems(size, pipeline.chunks, n)))
    enough = tuple(islice(fitting, 2))
    return enough if len(enough) == 2 and sum(enough) <= 0.75 * wanted else (wanted,)


def extrapolate(done: Sequence[Figures], counts: Sequence[int], wanted: int) -> Figures:
    """The figures with `wanted` microbatches, from those with each of one or two `counts`."""
    few, more = done[0], done[-1]
    if few is more or few.peak is None or more.peak is None:
        return few
    count, larger = counts

    def at(a: int, b: int) -> int:
        return a + (b - a) * (wanted - count) // (larger - count)

    sizes = {name: at(size, more.bytes[name]) for name, size in few.bytes.items()}
    sent = {axis: Traffic(*map(at, astuple(few.sent[axis]), astuple(found))) for axis, found in more.sent.items()}
    kept, peak = at(few.kept, more.kept), at(few.peak, more.peak)
    return Figures(few.parameters, sizes, kept, peak, sent, few.rows // count * wanted, few.communicators)


def _try_to_simulate(job: tuple[Any, ...]) -> Figures | list[str]:
    """The result of `simulate_rank`, or its problems."""
    try:
        return simulate_rank(*job)
    except Exception as error:  # of the model, or of torch; it may not be picklable
        return _problems_of(error)


def _problems_of(error: Exception) -> list[str]:
    if isinstance(error, ConfigError):
        return list(error.problems)
    if isinstance(error, HalfmeshError):
        return str(error).splitlines()
    reason = " ".join(str(error).splitlines()[:1])
    return [f"the simulation failed with {type(error).__name__}: {reason}; a real run may still work"]


@contextmanager
def workers(is_fresh: bool) -> Iterator[Map]:
    """The `map` of a pool of processes; of this process if something of torch has run in it (not `is_fresh`): then it
    cannot be forked."""
    if not is_fresh or sys.platform != "linux":
        yield map
        return
    # At least one process for each kind of rank, because their times differ.
    count = max(MOST_KINDS, os.cpu_count() or 1)
    with ProcessPoolExecutor(count, get_context("fork"), _begin_worker) as pool:
        yield pool.map


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of Ctrl-C the parent process tells
    gc.freeze()  # imported objects are not searched for garbage again: a tenth of a dry run
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao, once imported, makes each of them warn
    torch.set_num_threads(1)  # a fork has no threads of its parent process
