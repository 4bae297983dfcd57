"""A run of any size, planned on one machine: what each kind of rank holds, and what it sends."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import torch

from ..compat import Layout, get_layout
from ..division_plans import make_plans
from ..errors import ConfigError, HalfmeshError
from ..parallel.registries import SCHEDULES
from . import subject
from .rehearsal import Figures, Place, rehearse
from .tracker import Tracker, Traffic, dry_run_mode
from .workers import Workers, count_cores

if TYPE_CHECKING:
    from ..config import Config


MOST_KINDS = 3
"""Of ranks that are looked at: on the first, a middle and the last stage. Those of a stage are alike."""


@dataclass
class DryRun:
    """What a run would be.

    Attributes:
        problems: why it cannot run; empty if it can.
        ranks: what ranks of the first, middle and last stage hold and send, by rank.
        bubble: the part of a step in which a rank of the pipeline waits.
        extrapolated: None where all microbatches were run, else the two numbers of them that were.
        notes: what was left out.
        rows: of a data rank's batch; 0 if not known.
    """

    layout: Layout
    problems: list[str] = field(default_factory=list)
    ranks: dict[int, Figures] = field(default_factory=dict)
    bubble: float = 0.0
    extrapolated: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)
    rows: int = 0

    @property
    def largest(self) -> tuple[int, Figures]:
        """The rank that needs most, and its figures."""
        return max(self.ranks.items(), key=lambda item: needed(item[1]))

    def stage_of(self, rank: int) -> int:
        """The place of `rank` in the pipeline."""
        return rank // (self.layout.data * self.layout.tensor)


def needed(figures: Figures) -> int:
    """The bytes that a rank needs, as far as they are known."""
    return figures.peak if figures.peak is not None else figures.kept + figures.parts.get("gradients", 0)


def dry_run(config: Config, world_size: int, model: str, batch: tuple[str, ...] = (), is_fresh: bool = False) -> DryRun:
    """Plan a run of `config`, against which nothing is known, with the optimizer AdamW.

    Args:
        model: "package.module:build", see `subject.make`.
        batch: shapes of the model's inputs, in place of those that `build` returns.
        is_fresh: see `Workers`.
    """
    jobs = _jobs(config, get_layout(config, world_size))
    # One for each kind of rank, also where there are fewer cores: they take unequally long.
    with Workers(min(len(jobs), max(MOST_KINDS, count_cores())), is_fresh) as workers:
        return dry_run_with(workers, config, world_size, model, batch)


def dry_run_with(
    workers: Workers,
    config: Config,
    world_size: int,
    model: str,
    batch: tuple[str, ...] = (),
    rows: int | None = None,
) -> DryRun:
    """The same by workers that are there already, with so many rows in a data rank's batch."""
    layout = get_layout(config, world_size)
    run = DryRun(layout)
    config = _without_extras(config, run.notes)
    pipeline = config.parallel.pipeline
    if pipeline.size > 1:
        schedule = SCHEDULES.get(pipeline.schedule)
        run.bubble = schedule.bubble(pipeline.size, pipeline.chunks, pipeline.microbatches or 1)
        run.extrapolated = choose_counts(config)
    jobs = _jobs(config, layout)
    ranks = list(dict.fromkeys(rank for rank, _ in jobs))
    calls = [(config, model, batch, Place(rank, world_size), count, rows) for rank, count in jobs]
    found: dict[Job, Figures] = {}
    problems: dict[str, None] = {}
    for job, figures in zip(jobs, workers.run(try_to_rehearse, calls), strict=True):
        if isinstance(figures, Figures):
            found[job] = figures
        else:
            problems |= dict.fromkeys(figures)
    if problems:
        run.problems = list(problems | dict.fromkeys(find_model_problems(config, world_size, model)))
        return run
    for rank in ranks:
        if run.extrapolated is None:
            run.ranks[rank] = found[rank, None]
        else:
            few, more = run.extrapolated
            run.ranks[rank] = extrapolate(
                found[rank, few], found[rank, more], few, more, config.parallel.pipeline.microbatches or 1
            )
    run.rows = next(iter(run.ranks.values())).rows
    if any(figures.peak is None for figures in run.ranks.values()):
        run.notes.append(
            "what the model is called with is not known, so activations, communication and the peak are missing: "
            "give --batch, or let build return (model, inputs)"
        )
    return run


Job = tuple[int, int | None]
"""A rank, and the number of microbatches if it is not the config's."""


def _jobs(config: Config, layout: Layout) -> list[Job]:
    """What is run: each kind of rank, with one or two numbers of microbatches."""
    size = config.parallel.pipeline.size
    stages = sorted({0, size // 2, size - 1})  # MOST_KINDS
    counts = (choose_counts(config) if size > 1 else None) or (None,)
    return [(stage * layout.data * layout.tensor, count) for stage in stages for count in counts]


def find_model_problems(config: Config, world_size: int, model: str) -> list[str]:
    """Why the model cannot be divided as `config` says, which need not be right otherwise."""
    try:
        with dry_run_mode(), Tracker():
            given = subject.make(model).model
            make_plans(given, torch.optim.AdamW(given.parameters()), None, None, config, max(1, world_size))
    except ConfigError as error:
        return list(error.problems)
    except (HalfmeshError, ValueError) as error:  # ValueError: a model without parameters
        return str(error).splitlines()
    except Exception as error:
        return [_failed(error)]
    return []


def choose_counts(config: Config) -> tuple[int, int] | None:
    """Two numbers of microbatches from which all figures follow on a line; None if running all of them is as cheap.

    As soon as there are as many as the schedule ever has under way on a rank, each more adds the same.
    """
    pipeline = config.parallel.pipeline
    size, wanted = pipeline.size, pipeline.microbatches or 1
    schedule = SCHEDULES.get(pipeline.schedule)
    # One more than what is under way on the first rank: then forwards meet gradients. An interleaved one has up to
    # 2 (p - 1) + (v - 1) p forwards of stages under way, of which a microbatch has v.
    least = {"gpipe": 2}.get(pipeline.schedule, 3 * size if pipeline.chunks > 1 else size + 1)
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
    """Without what needs a compiler."""
    if config.compile.enabled:
        notes.append("compile is left out: compiled code holds less than what is counted here")
        config = config.model_copy(update={"compile": config.compile.model_copy(update={"enabled": False})})
    if config.parallel.data.cpu_offload:
        notes.append("cpu_offload: what it keeps in host memory is counted here as if it were on the device")
    return config


def try_to_rehearse(
    config: Config, model: str, batch: tuple[str, ...], place: Place, count: int | None = None, rows: int | None = None
) -> Figures | list[str]:
    """`rehearse`, or why it cannot be done."""
    try:
        return rehearse(config, model, batch, place, count, rows)
    except ConfigError as error:
        return list(error.problems)
    except HalfmeshError as error:
        return str(error).splitlines()
    except Exception as error:  # of the model, or of torch, which may not go through a pipe
        return [_failed(error)]


def _failed(error: Exception) -> str:
    reason = " ".join(str(error).splitlines()[:1])
    return f"the dry run failed with {type(error).__name__}: {reason}; a real run need not"
