"""The simplest change of a config by which it fits: changes are simulated one after the other, until one does."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..config.load import load_config
from ..errors import InputError, readable
from ..parallel.registries import DATA_STRATEGIES
from ..utils.torch_private import BATCH_NORMS
from .dry_run import dry_runs, find_plan_problems, needed
from .model_spec import build_model
from .rungs import (
    Candidate,
    Changes,
    PlanRequest,
    Update,
    axis_changes,
    describe_update,
    half_precision,
    make_layouts,
    make_rung,
    recomputations,
    strategy_changes,
)
from .tracker import Tracker, dry_run_mode

if TYPE_CHECKING:
    from ..config import Config
    from .dry_run import Workers
    from .simulate_rank import Figures

_REASON = 200
"""Characters of a note: a reason may list all modules of a model."""


@dataclass
class Ladder:
    """The changes that were tried.

    Attributes:
        update: the rows of an update; None if the unchanged config cannot be simulated.
        rungs: those with a dry run, and those that were refused, in order.
        chosen: the first that fits.
        notes: the changes that were left out, with reasons.
    """

    update: Update | None = None
    rungs: list[Candidate] = field(default_factory=list)
    chosen: Candidate | None = None
    notes: list[str] = field(default_factory=list)


def search_layouts(asked: PlanRequest, workers: Workers, say: Callable[[str], None] = lambda text: None) -> Ladder:
    """Try changes from the simplest on, up to the first that fits.

    Args:
        say: called with a text about each simulation.

    Raises:
        InputError: the model's inputs are not known.
    """
    search_layouts = _Climb(asked, workers, say)
    first = search_layouts.simulate([Candidate((), asked.config)])[0]
    if first.refused:
        return Ladder(rungs=[first])
    assert first.run is not None
    if not first.run.rows:
        raise InputError(
            f"--model {asked.model}: the model's inputs are not known, so no update can be simulated: give --batch, or "
            "let build return (model, inputs)"
        )
    search_layouts.begin(first, describe_update(asked.config, asked.world_size, first.run.rows))
    return search_layouts.ladder if search_layouts.ladder.chosen else search_layouts.run()


class _Climb:
    """Tries layouts in order, in each of them batches and recomputation."""

    def __init__(self, asked: PlanRequest, workers: Workers, say: Callable[[str], None]) -> None:
        self.ladder = Ladder()
        self._asked, self._workers, self._say = asked, workers, say
        self._tried: dict[tuple[Changes, str, int], Candidate] = {}
        self._refused: set[str] = set()
        self._recompute: list[str] = []
        self._splits_batches = True
        self._least: dict[str, tuple[int, int, int]] = {}
        """By data strategy: the bytes of each rank in the simplest layout, those of them that are state, and the number
        of ranks over which the axes sharded the model there."""

    def simulate(self, rungs: Sequence[Candidate]) -> list[Candidate]:
        """`rungs` with their dry runs, or the reasons why there are none."""
        asked, wanted = self._asked, [rung for rung in rungs if not rung.refused]
        for rung in wanted:
            self._say(f"simulating {' '.join(rung.changes) or 'the config as it is'}")
        calls = [(rung.config, rung.rows) for rung in wanted]
        found = iter(dry_runs(self._workers, calls, asked.world_size, asked.model, asked.batch, asked.room))
        runs = [None if rung.refused else next(found) for rung in rungs]
        return [
            replace(rung, run=run, refused="\n".join(run.problems)) if run else rung
            for rung, run in zip(rungs, runs, strict=True)
        ]

    def begin(self, first: Candidate, update: Update) -> None:
        """Begin with the unchanged config, which could be simulated."""
        assert first.run is not None
        self._update = self.ladder.update = update
        first = replace(first, rows=first.run.rows, passes=update.cycle * first.run.rows // update.at_once)
        self._tried[(), "", update.at_once] = first
        self.ladder.rungs = [first]
        self.ladder.chosen = first if self._fits(first) else None

    def run(self) -> Ladder:
        """Try all layouts."""
        self._look_at_model()
        before = half_precision(self._asked)
        order: list[Changes] = [()]
        for changes in make_layouts(self._asked, before, lambda change: change not in self._refused):
            order += [changes] if changes else []
            if not self._is_hopeless(changes):
                self.ladder.chosen = self._try_layout(changes)
            if self.ladder.chosen is not None:
                break
        kinds = ["", *self._recompute]
        self.ladder.rungs = [
            rung
            for changes in order
            for (_, kind, _), rung in sorted(
                ((key, rung) for key, rung in self._tried.items() if key[0] == changes),
                key=lambda item: (kinds.index(item[0][1]), -item[0][2]),
            )
        ]
        if self.ladder.chosen is not None:
            del self.ladder.rungs[self.ladder.rungs.index(self.ladder.chosen) + 1 :]
        return self.ladder

    def _look_at_model(self) -> None:
        """Leave out changes that the composition table or the model does not allow."""
        asked, update, kinds = self._asked, self._update, list(recomputations(self._asked.config))
        single: list[Changes] = [(change,) for _, change, _ in axis_changes(asked)]
        single += [(change,) for change in strategy_changes(asked.config)]
        tried = [(changes, "", self._sizes(changes)[0]) for changes in single] + [
            ((), k, update.at_once) for k in kinds
        ]
        rungs = [make_rung(asked, update, *key) for key in tried]
        call = ([rung.config for rung in rungs], asked.world_size, asked.model)
        ((has_batch_norm, problems),) = self._workers.run(_look_at, [call])
        left_out: dict[str, list[str]] = {}  # by reason: an axis of any size may have the same
        for (changes, kind, _), rung, reasons in zip(tried, rungs, problems, strict=True):
            if reasons := [*rung.refused.splitlines(), *reasons]:
                change = f"activation_checkpoint={kind}" if kind else changes[0]
                self._refused.add(change)
                reason = textwrap.shorten(reasons[0].splitlines()[0], _REASON, placeholder=" ...")
                left_out.setdefault(reason, []).append(change)
        for reason, names in left_out.items():
            self.ladder.notes.append(f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} left out: {reason}")
        self._recompute = [k for k in kinds if f"activation_checkpoint={k}" not in self._refused]
        if has_batch_norm:
            self._splits_batches = False
            self.ladder.notes.append("smaller batches are left out: BatchNorm's statistics would change")

    def _try_layout(self, changes: Changes) -> Candidate | None:
        """The simplest batch and recomputation by which the layout fits."""
        sizes, kinds = self._sizes(changes), ["", *self._recompute]
        most, fewest = sizes[0], sizes[-1]
        first, last = self._try([(changes, "", most), (changes, kinds[-1], most)])
        if first.refused or self._fits(first):
            return None if first.refused else first
        if first.state > self._asked.room:
            self._note_least(first, lambda figures: figures.state)
            self._tried = {key: rung for key, rung in self._tried.items() if rung is not last or last is first}
            return None
        if not self._fits(last):
            # Accumulated gradients take memory, too, so that smaller batches may need more.
            hopeless = self._cannot_shrink(last, fewest / most)
            (small,) = [last] if hopeless else self._try([(changes, kinds[-1], fewest)])
            if not self._fits(small):
                self._note_least(min(last, small, key=lambda rung: rung.needs), needed)
                return None
        for kind in kinds:
            large = self._tried.get((changes, kind, most))
            if large is None or not (self._fits(large) or self._cannot_shrink(large, fewest / most)):
                large, small = self._try([(changes, kind, most), (changes, kind, fewest)])  # on two cores
                if not self._fits(large) and self._fits(small):
                    return self._find_largest(changes, kind, sizes)
            if self._fits(large):
                return large
        return None

    def _find_largest(self, changes: Changes, kind: str, sizes: Sequence[int]) -> Candidate:
        """The largest batch that fits, where the first of `sizes` does not and the last does."""
        too_large, fits = 0, len(sizes) - 1
        while fits - too_large > 1:
            middle = (fits + too_large) // 2
            (rung,) = self._try([(changes, kind, sizes[middle])])
            too_large, fits = (too_large, middle) if self._fits(rung) else (middle, fits)
        return self._tried[changes, kind, sizes[fits]]

    def _try(self, wanted: Sequence[tuple[Changes, str, int]]) -> list[Candidate]:
        new = [key for key in dict.fromkeys(wanted) if key not in self._tried]
        rungs = [make_rung(self._asked, self._update, *key) for key in new]
        self._tried |= zip(new, self.simulate(rungs), strict=True)
        return [self._tried[key] for key in wanted]

    def _sizes(self, changes: Changes) -> list[int]:
        """Numbers of rows that can go through the model at once, most first: those of the config, or fractions."""
        at_once = self._update.at_once
        sizes = [n for n in range(at_once, 0, -1) if at_once % n == 0] if self._splits_batches else [at_once]
        allowed = [n for n in sizes if not make_rung(self._asked, self._update, changes, "", n).refused]
        return allowed or sizes[:1]

    def _fits(self, rung: Candidate) -> bool:
        return not rung.refused and rung.needs <= self._asked.room

    def _cannot_shrink(self, rung: Candidate, part: float) -> bool:
        """Return True if the rung does not fit with `part` of its rows either: memory shrinks by no more."""
        return rung.needs * part > self._asked.room

    def _note_least(self, rung: Candidate, of: Callable[[Figures], int]) -> None:
        """Remember the least memory that this layout can need: this rung's, by the figure that `of` selects."""
        if rung.run is not None and not rung.refused:
            ranks, figures = math.prod(rung.config.parallel.sizes.values()), rung.run.ranks.values()
            least = min(map(of, figures)), min(one.state for one in figures), ranks
            self._least.setdefault(rung.config.parallel.data.strategy, least)

    def _is_hopeless(self, changes: Changes) -> bool:
        """Return True if a layout cannot fit: a simpler one with the same data strategy needs too much, even if axes
        shard all evenly."""
        parallel = load_config(self._asked.config, changes).parallel
        if parallel.data.strategy not in self._least:
            return False
        needs, state, ranks = self._least[parallel.data.strategy]
        part = ranks / math.prod(parallel.sizes.values())
        shared = DATA_STRATEGIES.get(parallel.data.strategy).shards_model and parallel.data.hybrid is None
        least = max(needs * part, state if shared else state * part)  # if shared, it is sharded over all ranks already
        if least > self._asked.room:
            evenly = f"at best {readable(least)}, if the axes sharded everything evenly"
            self.ladder.notes.append(f"{' '.join(changes)} is left out: {evenly}")
        return least > self._asked.room


def _look_at(configs: Sequence[Config], world_size: int, model: str) -> tuple[bool, list[list[str]]]:
    """True if the model has BatchNorm; and for each config the reasons why the model cannot be sharded by it."""
    with dry_run_mode(), Tracker():
        given = build_model(model).model
        has_batch_norm = any(isinstance(module, BATCH_NORMS) for module in given.modules())
        return has_batch_norm, [find_plan_problems(config, world_size, given) for config in configs]
