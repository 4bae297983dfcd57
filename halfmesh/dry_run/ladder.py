"""The simplest change of a config by which it fits: changes are simulated one after the other, until one does."""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ..config.load import load_config
from ..errors import InputError, readable
from ..parallel.expert import NO_EXPERTS
from ..parallel.registries import DATA_STRATEGIES
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
from .dry_run import Map, dry_runs, find_plan_problems
from .model_spec import build_model
from .tracker import Tracker, dry_run_mode

if TYPE_CHECKING:
    from ..config import Config

_REASON = 200
"""Characters of a note: a reason may list all modules of a model."""
_SIMULATIONS = 2
"""Of most layouts: without and with recomputation."""


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


Say = Callable[[str, int | None], None]
"""Called before each simulation with its changes, and about how many simulations it takes to try all layouts (None: not
known)."""


def search_layouts(asked: PlanRequest, over: Map, say: Say) -> Ladder:
    """Try changes from the simplest on, up to the first that fits.

    Args:
        over: see `workers`.

    Raises:
        InputError: the model's inputs are not known.
    """
    (first,) = _simulate(asked, over, say, [Candidate((), asked.config)])
    if first.rejected or first.run is None:
        return Ladder(candidates=[first])
    if not first.run.rows:
        raise InputError(
            f"--model {asked.model}: the model's inputs are not known, so no update can be simulated: give --batch, or "
            "return (model, inputs) from build()"
        )
    update = describe_update(asked.config, asked.world_size, first.run.rows)
    first = replace(first, rows=first.run.rows, passes=update.cycle * first.run.rows // update.at_once)
    if first.needs <= asked.room:
        return Ladder(update, [first], first)
    return _Search(asked, over, say, first, update).run()


def _simulate(
    asked: PlanRequest, over: Map, say: Say, candidates: Sequence[Candidate], about: int | None = None
) -> list[Candidate]:
    """`candidates` with their dry runs, or the reasons why there are none."""
    wanted = [candidate for candidate in candidates if not candidate.rejected]
    for candidate in wanted:
        say(" ".join(candidate.changes) or UNCHANGED, about)
    configs = [(candidate.config, candidate.rows) for candidate in wanted]
    found = iter(dry_runs(over, configs, asked.world_size, asked.model, asked.batch, asked.room))
    return [
        candidate
        if candidate.rejected
        else replace(candidate, run=(run := next(found)), rejected="\n".join(run.problems))
        for candidate in candidates
    ]


class _Search:
    """Tries layouts in order, in each of them batches and recomputation."""

    def __init__(self, asked: PlanRequest, over: Map, say: Say, first: Candidate, update: Update) -> None:
        self._asked, self._over, self._say, self._update = asked, over, say, update
        self._tried: dict[tuple[Changes, str, int], Candidate] = {((), "", update.at_once): first}
        self._notes: list[str] = []
        self._about: int | None = None
        self._splits_batches = True
        self._kinds = ["", *recomputations(asked.config)]
        self._least: dict[str, tuple[int, int, int]] = {}
        """By data strategy: the bytes of each rank in the simplest layout, those of them that are state, and the number
        of ranks over which the axes sharded the model there."""

    def run(self) -> Ladder:
        """Try all layouts."""
        rejected = self._find_rejected()
        before = () if self._asked.config.precision else ("bf16.mode=torch",)
        layouts = [(), *make_layouts(self._asked, before, lambda change: change not in rejected)]
        chosen = None
        for number, changes in enumerate(layouts[1:], 1):
            self._about = len(self._tried) + _SIMULATIONS * (len(layouts) - number)
            chosen = None if self._is_hopeless(changes) else self._try_layout(changes)
            if chosen is not None:
                break
        keys = sorted(self._tried, key=lambda key: (layouts.index(key[0]), self._kinds.index(key[1]), -key[2]))
        candidates = [self._tried[key] for key in keys]
        end = len(candidates) if chosen is None else candidates.index(chosen) + 1
        return Ladder(self._update, candidates[:end], chosen, self._notes)

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
        left_out: dict[str, list[str]] = {}  # by reason: an axis of any size may have the same
        for change, candidate, reasons in zip(tried, candidates, problems, strict=True):
            if reasons := [*candidate.rejected.splitlines(), *reasons]:
                reason = textwrap.shorten(reasons[0].splitlines()[0], _REASON, placeholder=" ...")
                left_out.setdefault(reason, []).append(change)
        for reason, names in left_out.items():
            if NO_EXPERTS in reason:  # as of most models
                continue
            self._notes.append(f"not tried: {', '.join(names)}: {reason}")
        if has_batch_norm:
            self._splits_batches = False
            self._notes.append("not tried: smaller batches: BatchNorm's statistics would change")
        rejected = {change for names in left_out.values() for change in names}
        self._kinds = [kind for kind in self._kinds if f"activation_checkpoint={kind}" not in rejected]
        return rejected

    def _try_layout(self, changes: Changes) -> Candidate | None:
        """The simplest batch and recomputation by which the layout fits."""
        sizes, kinds, room = self._sizes(changes), self._kinds, self._asked.room
        most, fewest = sizes[0], sizes[-1]
        first, last = self._try((changes, "", most), (changes, kinds[-1], most))  # on two cores
        if first.rejected or self._fits(first):
            return None if first.rejected else first
        if first.state > room:
            self._note_least(first, "state")
            if len(kinds) > 1:
                del self._tried[changes, kinds[-1], most]
            return None
        if not self._fits(last):
            # Memory shrinks by no more than the rows. Accumulated gradients take memory, too, so that smaller batches
            # may need more.
            hopeless = last.needs * fewest / most > room
            (small,) = (last,) if hopeless else self._try((changes, kinds[-1], fewest))
            if not self._fits(small):
                self._note_least(min(last, small, key=lambda candidate: candidate.needs), "needed")
                return None
        for kind in kinds:
            large, small = self._try((changes, kind, most), (changes, kind, fewest))
            if self._fits(large):
                return large
            if self._fits(small):
                index = bisect_left(sizes, True, key=lambda rows: self._fits(*self._try((changes, kind, rows))))
                return self._tried[changes, kind, sizes[index]]
        return None

    def _try(self, *wanted: tuple[Changes, str, int]) -> list[Candidate]:
        new = [key for key in dict.fromkeys(wanted) if key not in self._tried]
        candidates = [make_candidate(self._asked, self._update, *key) for key in new]
        self._tried |= zip(new, _simulate(self._asked, self._over, self._say, candidates, self._about), strict=True)
        return [self._tried[key] for key in wanted]

    def _sizes(self, changes: Changes) -> list[int]:
        """Numbers of rows that can go through the model at once, most first: those of the config, or fractions."""
        at_once = self._update.at_once
        sizes = [n for n in range(at_once, 0, -1) if at_once % n == 0] if self._splits_batches else [at_once]
        allowed = [n for n in sizes if not make_candidate(self._asked, self._update, changes, "", n).rejected]
        return allowed or sizes[:1]

    def _fits(self, candidate: Candidate) -> bool:
        return not candidate.rejected and candidate.needs <= self._asked.room

    def _note_least(self, candidate: Candidate, figure: Literal["state", "needed"]) -> None:
        """Remember the least memory that this layout can need: this `figure` of the smallest rank of `candidate`."""
        if candidate.run is not None and not candidate.rejected:
            found, ranks = candidate.run.ranks.values(), candidate.config.parallel.ranks_of_batch
            least = min(getattr(one, figure) for one in found), min(one.state for one in found), ranks
            self._least.setdefault(candidate.config.parallel.data.strategy, least)

    def _is_hopeless(self, changes: Changes) -> bool:
        """Return True if a layout cannot fit: a simpler one with the same data strategy needs too much, even if axes
        shard all evenly."""
        parallel = load_config(self._asked.config, changes).parallel
        if parallel.data.strategy not in self._least:
            return False
        needs, state, ranks = self._least[parallel.data.strategy]
        part = ranks / parallel.ranks_of_batch
        strategy, everyone = DATA_STRATEGIES.get(parallel.data.strategy), self._asked.world_size
        shared = strategy.shards_model and strategy.ranks_of_copy(parallel.data, everyone) == everyone
        least = max(needs * part, state if shared else state * part)  # if shared, it is sharded over all ranks already
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
