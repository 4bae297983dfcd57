"""A run of any size, simulated on one machine: the memory and the communication of each kind of rank."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, field
from itertools import islice
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import nn

from ..config.composition import Setup
from ..engine.parallelize import make_plans
from ..errors import ConfigError, HalfmeshError
from ..parallel.registries import SCHEDULES
from .model_spec import build_model
from .simulate_rank import Figures, simulate_rank
from .tracker import Tracker, Traffic, dry_run_mode

if TYPE_CHECKING:
    from ..config import Config
    from ..config.schema import PipelineConfig

MOST_KINDS = 3
"""Ranks that are simulated: on the first, a middle and the last stage. The ranks of a stage are equal."""


@dataclass
class DryRun:
    """The memory and communication that a run would need.

    Attributes:
        sizes: of the mesh axes, by their names, outermost first.
        problems: the reasons why it cannot run; empty if it can.
        ranks: the figures of ranks of the first, middle and last stage, by rank.
        bubble: the fraction of a step in which a rank of the pipeline waits.
        extrapolated: None if all microbatches were simulated, else the two numbers of microbatches that were.
        notes: costs that are not counted.
        rows: of a data rank's batch; 0 if not known.
    """

    sizes: Mapping[str, int]
    world_size: int
    problems: list[str] = field(default_factory=list)
    ranks: dict[int, Figures] = field(default_factory=dict)
    bubble: float = 0.0
    extrapolated: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)
    rows: int = 0

    @property
    def largest(self) -> tuple[int, Figures]:
        """The rank that needs the most memory, and its figures."""
        return max(self.ranks.items(), key=lambda item: needed(item[1]))

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of `rank`."""
        return rank // (self.world_size // self.sizes["pp"])


def needed(figures: Figures) -> int:
    """The bytes that a rank needs, as far as known."""
    return figures.peak if figures.peak is not None else figures.state


def dry_run(config: Config, world_size: int, model: str, batch: tuple[str, ...] = (), is_fresh: bool = False) -> DryRun:
    """Simulate one update of `config`, which passes `compat.check`, with AdamW.

    Args:
        model: "package.module:build", see `build_model`.
        batch: shapes of the model's inputs, instead of those that `build` returns.
        is_fresh: see `Workers`.
    """
    jobs = len(_Simulated(config, None, world_size).jobs)
    # One per kind of rank even with fewer cores, because their times differ.
    with Workers(min(jobs, max(MOST_KINDS, count_cores())), is_fresh) as workers:
        return dry_runs(workers, [(config, None)], world_size, model, batch)[0]


def dry_runs(
    workers: Workers,
    wanted: Sequence[tuple[Config, int | None]],
    world_size: int,
    model: str,
    batch: tuple[str, ...] = (),
    limit: int | None = None,
) -> list[DryRun]:
    """Several dry runs in parallel, each a config with the rows of its batch (None: those of the inputs); `limit`: see
    `simulate_rank`."""
    runs = [_Simulated(config, rows, world_size) for config, rows in wanted]
    calls = [
        (run.config, model, batch, rank, world_size, count, run.rows, limit) for run in runs for rank, count in run.jobs
    ]
    results = iter(workers.run(_try_to_simulate, calls))
    return [run.collect(list(islice(results, len(run.jobs))), model) for run in runs]


class _Simulated:
    """One dry run: the ranks to simulate, and their combined figures."""

    def __init__(self, config: Config, rows: int | None, world_size: int) -> None:
        self.rows = rows
        self.run = DryRun(config.parallel.dims(world_size).sizes, world_size)
        self.config = _without_extras(config, self.run.notes)
        self._pipeline = pipeline = self.config.parallel.pipeline
        if pipeline.size > 1:
            schedule = SCHEDULES.get(pipeline.schedule)
            self.run.bubble = schedule.bubble(pipeline.size, pipeline.chunks, pipeline.microbatches or 1)
            self.run.extrapolated = choose_counts(pipeline)
        stages = sorted({0, pipeline.size // 2, pipeline.size - 1})  # MOST_KINDS
        ranks = [stage * (world_size // pipeline.size) for stage in stages]
        self.jobs = [(rank, count) for rank in ranks for count in self.run.extrapolated or (None,)]
        """Ranks, each with a number of microbatches (None: the config's)."""

    def collect(self, results: list[Figures | list[str]], model: str) -> DryRun:
        run = self.run
        problems = [problem for result in results if isinstance(result, list) for problem in result]
        if problems:
            more = find_model_problems(self.config, run.world_size, model)
            run.problems = list(dict.fromkeys([*problems, *more]))
            return run
        figures = {job: result for job, result in zip(self.jobs, results, strict=True) if isinstance(result, Figures)}
        for rank in dict.fromkeys(rank for rank, _ in self.jobs):
            if run.extrapolated is None:
                run.ranks[rank] = figures[rank, None]
            else:
                few, more_ = run.extrapolated
                wanted = self._pipeline.microbatches or 1
                run.ranks[rank] = extrapolate(figures[rank, few], figures[rank, more_], few, more_, wanted)
        run.rows = next(iter(run.ranks.values())).rows
        if run.rows == 0:
            run.notes.append(
                "the model's inputs are not known, so activations, communication and the peak are missing: give "
                "--batch, or let build return (model, inputs)"
            )
        return run


def find_model_problems(config: Config, world_size: int, model: str) -> list[str]:
    """The reasons why the model cannot be sharded by `config`."""
    try:
        with dry_run_mode(), Tracker():
            return find_plan_problems(config, world_size, build_model(model).model)
    except HalfmeshError as error:
        return _problems_of(error)


def find_plan_problems(config: Config, world_size: int, model: nn.Module) -> list[str]:
    """The same for a model that was built in a dry run."""
    try:
        make_plans(model, torch.optim.AdamW(model.parameters()), None, None, Setup.of(config, world_size))
    except Exception as error:
        return [str(error)] if type(error) is ValueError else _problems_of(error)  # torch's: without parameters
    return []


def choose_counts(pipeline: PipelineConfig) -> tuple[int, int] | None:
    """Two numbers of microbatches to extrapolate from; None if running all of them is as cheap.

    Beyond the most that the schedule has in flight on a rank, each further microbatch adds the same.
    """
    size, wanted = pipeline.size, pipeline.microbatches or 1
    schedule = SCHEDULES.get(pipeline.schedule)
    # One more than are in flight on the first rank: then forwards run with gradients in memory. An interleaved schedule
    # has up to 2 (p - 1) + (v - 1) p forwards of stages in flight, of which a microbatch has v; one that runs the
    # gradients of weights later keeps activations longer.
    least = {"gpipe": 2}.get(pipeline.schedule, 3 * size if pipeline.chunks > 1 else size + 1)
    least += size * schedule.splits_backward
    fitting = (n for n in range(least, wanted) if not any(schedule.find_problems(size, pipeline.chunks, n)))
    enough = list(islice(fitting, 2))
    if len(enough) < 2 or enough[0] + enough[1] > 0.75 * wanted:
        return None
    return enough[0], enough[1]


def extrapolate(few: Figures, more: Figures, count: int, larger: int, wanted: int) -> Figures:
    """The figures with `wanted` microbatches, from those with `count` and with `larger`."""

    def at(a: int, b: int) -> int:
        return a + (b - a) * (wanted - count) // (larger - count)

    if few.peak is None or more.peak is None:
        return few
    parts = {part: at(few.parts[part], more.parts[part]) for part in few.parts}
    traffic = {
        axis: Traffic(*map(at, astuple(few.traffic[axis]), astuple(sent))) for axis, sent in more.traffic.items()
    }
    return Figures(
        parts, at(few.kept, more.kept), at(few.peak, more.peak), few.numel, traffic, few.rows // count * wanted
    )


def _without_extras(config: Config, notes: list[str]) -> Config:
    """The config without `compile`, with notes about left-out features."""
    if config.compile.enabled:
        notes.append("compile is left out: compiled code needs less memory than counted here")
        config = config.model_copy(update={"compile": config.compile.model_copy(update={"enabled": False})})
    if config.parallel.data.cpu_offload or config.activation_offload:
        notes.append("offloading is left out: offloaded tensors are counted as if they were on the device")
    return config


def _try_to_simulate(*call: object) -> Figures | list[str]:
    """The result of `simulate_rank`, or its problems."""
    try:
        return simulate_rank(*call)  # type: ignore[arg-type]
    except Exception as error:  # of the model, or of torch; it may not be picklable
        return _problems_of(error)


def _problems_of(error: Exception) -> list[str]:
    if isinstance(error, ConfigError):
        return list(error.problems)
    if isinstance(error, HalfmeshError):
        return str(error).splitlines()
    reason = " ".join(str(error).splitlines()[:1])
    return [f"the dry run failed with {type(error).__name__}: {reason}; a real run may still work"]


T = TypeVar("T")


class Workers:
    """Processes that work in parallel.

    Args:
        count: the most processes; 1 works in this process.
        is_fresh: nothing of torch has run in this process, so that processes forked from it can work. Others import
            torch first, which takes a few seconds.
    """

    def __init__(self, count: int, is_fresh: bool) -> None:
        method = "fork" if is_fresh and sys.platform == "linux" else "spawn"
        # Imported objects are not searched for garbage again: a tenth of a dry run.
        self._pool = ProcessPoolExecutor(count, get_context(method), gc.freeze) if count > 1 else None

    def run(self, function: Callable[..., T], calls: Iterable[Sequence[Any]]) -> list[T]:
        """The result of `function` for each of the arguments, in their order."""
        if self._pool is None:
            return [function(*call) for call in calls]
        running = [self._pool.submit(_alone, function, *call) for call in calls]
        return [job.result() for job in running]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def count_cores() -> int:
    """The number of cores, at least 1."""
    return os.cpu_count() or 1


def _alone(function: Callable[..., T], *call: Any) -> T:
    torch.set_num_threads(1)  # a fork has no threads of its parent process
    return function(*call)
