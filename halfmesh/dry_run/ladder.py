"""The simplest change of a config by which it fits: changes are simulated one after the other, until one does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..config.load import load_config
from ..errors import InputError, cut, readable
from ..parallel.expert import NO_EXPERTS
from ..utils.torch_private import BATCH_NORMS
from .candidates import (
    UNCHANGED,
    Candidate,
    Changes,
    PlanRequest,
    Update,
    axis_changes,
    describe_update,
    make_candidate,
    make_layouts,
    recomputations,
    strategy_changes,
)
from .dry_run import Map, dry_run, find_plan_problems
from .model_spec import build_model
from .tracker import Tracker, dry_run_mode

if TYPE_CHECKING:
    from ..config import Config


@dataclass
class Ladder:
    """The changes that were tried.

    Attributes:
        update: the rows of an update; None if the unchanged config cannot be simulated.
        candidates: those with a dry run, and those that were rejected, in order.
        chosen: the first that fits.
        notes: the changes that were left out, with reasons.
    """

    update: Update | None = None
    candidates: list[Candidate] = field(default_factory=list)
    chosen: Candidate | None = None
    notes: list[str] = field(default_factory=list)


Say = Callable[[str], None]
"""Called before each simulation with its changes."""


def search_layouts(asked: PlanRequest, over: Map, say: Say) -> Ladder:
    """Try changes from the simplest on, up to the first that fits.

    Args:
        over: see `workers`.

    Raises:
        InputError: the model's inputs are not known.
    """
    first = _simulate(asked, over, say, Candidate((), asked.config))
    if first.rejected or first.run is None:
        return Ladder(candidates=[first])
    if not first.run.rows:
        raise InputError(f"--model {asked.model}: its inputs are not known: give --batch, or return (model, inputs)")
    update = describe_update(asked.config, asked.world_size, first.run.rows)
    first = replace(first, rows=first.run.rows, passes=update.cycle * first.run.rows // update.at_once)
    if first.needs <= asked.room:
        return Ladder(update, [first], first)
    return _Search(asked, over, say, first, update).run()


def _simulate(asked: PlanRequest, over: Map, say: Say, candidate: Candidate) -> Candidate:
    """`candidate` with its dry run, or the reasons why there is none."""
    if candidate.rejected:
        return candidate
    say(" ".join(candidate.changes) or UNCHANGED)
    config, rows = candidate.config, candidate.rows
    run = dry_run(over, config, asked.world_size, asked.model, asked.batch, rows, asked.room)
    return replace(candidate, run=run, rejected="\n".join(run.problems))


class _Search:
    """Tries layouts in order, in each of them batches and recomputation."""

    def __init__(self, asked: PlanRequest, over: Map, say: Say, first: Candidate, update: Update) -> None:
        self._asked, self._over, self._say, self._update = asked, over, say, update
        self._tried: dict[tuple[Changes, str, int], Candidate] = {((), "", update.at_once): first}
        self._notes: list[str] = []
        self._splits_batches = True
        self._kinds = ["", *recomputations(asked.config)]
        self._least: dict[str, int] = {}
        """By data strategy: the bytes of state of all ranks over which the axes shard the model, in the simplest layout
        whose state is too large."""

    def run(self) -> Ladder:
        """Try all layouts."""
        rejected = self._find_rejected()
        before = () if self._asked.config.precision else ("bf16.mode=torch",)
        chosen = None
        for changes in make_layouts(self._asked, before, lambda change: change not in rejected):
            chosen = None if self._is_hopeless(changes) else self._try_layout(changes)
            if chosen is not None:
                break
        others = [candidate for candidate in self._tried.values() if not self._fits(candidate)]
        return Ladder(self._update, others if chosen is None else [*others, chosen], chosen, self._notes)

    def _find_rejected(self) -> set[str]:
        """The changes that the composition table or the model does not allow. Notes them, and what else is left out."""
        asked, update = self._asked, self._update
        single = [change for _, change, _ in axis_changes(asked)] + strategy_changes(asked.config)
        tried: dict[str, tuple[Changes, str, int]] = {
            **{change: ((change,), "", self._sizes((change,))[0]) for change in single},
            **{f"activation_checkpoint={kind}": ((), kind, update.at_once) for kind in self._kinds[1:]},
        }
        candidates = [make_candidate(asked, update, *key) for key in tried.values()]
        job = ([candidate.config for candidate in candidates], asked.world_size, asked.model)
        ((has_batch_norm, problems),) = self._over(_inspect_model, [job])
        rejected = set()
        for change, candidate, reasons in zip(tried, candidates, problems, strict=True):
            if reasons := [*candidate.rejected.splitlines(), *reasons]:
                rejected.add(change)
                if NO_EXPERTS not in reasons[0]:  # as of most models
                    self._notes.append(f"not tried: {change}: {cut(reasons[0].splitlines()[0], 200)}")
        if has_batch_norm:
            self._splits_batches = False
            self._notes.append("not tried: smaller batches: BatchNorm's statistics would change")
        self._kinds = [kind for kind in self._kinds if f"activation_checkpoint={kind}" not in rejected]
        return rejected

    def _try_layout(self, changes: Changes) -> Candidate | None:
        """The simplest batch and recomputation by which the layout fits."""
        sizes, room = self._sizes(changes), self._asked.room
        for kind in self._kinds:
            large = self._try(changes, kind, sizes[0])
            if large.rejected or self._fits(large):
                return None if large.rejected else large
            if large.run is not None and large.state > room:
                state = min(figures.state for figures in large.run.ranks.values())
                parallel = large.config.parallel
                self._least.setdefault(parallel.data.strategy, state * parallel.ranks_of_batch)
                return None
            if self._fits(self._try(changes, kind, sizes[-1])):
                index = bisect_left(sizes, True, key=lambda rows: self._fits(self._try(changes, kind, rows)))
                return self._tried[changes, kind, sizes[index]]
        return None

    def _try(self, changes: Changes, kind: str, rows: int) -> Candidate:
        key = changes, kind, rows
        if key not in self._tried:
            candidate = make_candidate(self._asked, self._update, *key)
            self._tried[key] = _simulate(self._asked, self._over, self._say, candidate)
        return self._tried[key]

    def _sizes(self, changes: Changes) -> list[int]:
        """Numbers of rows that can go through the model at once, most first: those of the config, or fractions."""
        at_once = self._update.at_once
        sizes = [n for n in range(at_once, 0, -1) if at_once % n == 0] if self._splits_batches else [at_once]
        allowed = [n for n in sizes if not make_candidate(self._asked, self._update, changes, "", n).rejected]
        return allowed or sizes[:1]

    def _fits(self, candidate: Candidate) -> bool:
        return not candidate.rejected and candidate.needs <= self._asked.room

    def _is_hopeless(self, changes: Changes) -> bool:
        """Return True if a layout cannot fit: the state of a simpler one with the same data strategy is too large, even
        if axes shard it evenly."""
        parallel = load_config(self._asked.config, changes).parallel
        least = self._least.get(parallel.data.strategy, 0) / parallel.ranks_of_batch
        if least > self._asked.room:
            evenly = f"a rank would need at least {readable(least)}, even if the axes sharded everything evenly"
            self._notes.append(f"not tried: {' '.join(changes)}: {evenly}")
        return least > self._asked.room


def _inspect_model(job: tuple[Sequence[Config], int, str]) -> tuple[bool, list[list[str]]]:
    """True if the model has BatchNorm; and for each config the reasons why the model cannot be sharded by it."""
    configs, world_size, model = job
    with dry_run_mode(), Tracker():
        built = build_model(model).model
        has_batch_norm = any(isinstance(module, BATCH_NORMS) for module in built.modules())
        return has_batch_norm, [find_plan_problems(config, world_size, built) for config in configs]
