"""The best way to train a model on so many devices: rules first, then estimates, then dry runs of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..compat import check
from ..errors import InputError
from . import candidates as choices
from .candidates import CHECKPOINTS, FP32, Candidate, Mesh
from .dry_run import DryRun, dry_run_with, needed
from .estimates import Profile, bubble, estimate, ring
from .model_facts import ModelFacts, find_facts
from .profiles import Kind, find_profiles
from .ranking import Row, order, why
from .wish import Wish
from .workers import Workers

_AT_ONCE = 4
"""Layouts whose dry runs are made before they are compared."""
_ROUNDS = 3
"""Of these, for each precision and recomputation, if none fits."""
_MOST_REFUSED = 32
"""Dry runs that may fail, in a whole search, before no more are tried."""


@dataclass
class Found:
    """What a search has found.

    Attributes:
        rows: of an update.
        chosen: the best, whose dry run fits; None if nothing does.
        closest: what needs least then.
        reason: why it is before the second, if there is one.
        listed: the best layouts, in order; first those with a dry run.
        counted: candidates that were looked at.
        runs: dry runs that were made.
        notes: what was left out, and why.
        problems: if nothing could be run at all, whatever the memory: why, each reason once.
    """

    rows: int
    chosen: Row | None = None
    closest: Row | None = None
    reason: str = ""
    listed: list[Row] = field(default_factory=list)
    counted: int = 0
    runs: int = 0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def search(wish: Wish, workers: Workers, say: Callable[[str], None] = lambda text: None) -> Found:
    """Look for it.

    Args:
        say: is told how far it is.

    Raises:
        InputError: the model cannot be built, what it is called with is not known, or the rows cannot be divided.
    """
    say("looking at the model")
    sizes = [size for size in choices.divisors(wish.world_size) if size <= wish.node and wish.node % size == 0]
    call = (wish.model, wish.batch, sizes, choices.divisors(wish.world_size))
    (facts,) = workers.run(find_facts, [call])
    if not facts.rows:
        raise InputError(
            f"--model {wish.model}: what the model is called with is not known, so nothing can be compared: give "
            "--batch, or let build return (model, inputs)"
        )
    meshes = choices.make_meshes(wish.world_size, wish.node, facts)
    rows = wish.rows or facts.rows * wish.world_size
    choices.refuse_batch(rows, meshes)
    return _Search(wish, workers, say, facts, meshes, Found(rows, notes=list(facts.notes))).run()


class _Search:
    """One search. Precisions and recomputations are looked at in the order of the ranking, until something fits."""

    def __init__(
        self,
        wish: Wish,
        workers: Workers,
        say: Callable[[str], None],
        facts: ModelFacts,
        meshes: Sequence[Mesh],
        found: Found,
    ) -> None:
        self._wish = wish
        self._workers = workers
        self._say = say
        self._facts = facts
        self._meshes = meshes
        self._found = found
        self._estimates: list[Row] = []
        self._tried: list[Row] = []
        self._refused: set[tuple[object, ...]] = set()
        self._composing: dict[Candidate, bool] = {}
        self._reasons: dict[str, None] = {}
        self._errors: dict[tuple[object, ...], float] = {}
        """Of a family of layouts: what a dry run needed, by what was estimated."""

    def run(self) -> Found:
        found = self._found
        for kinds in self._classes():
            self._estimate(kinds)
            self._try_best(kinds)
            if any(row.has_room for row in self._tried):
                break
        if not any(row.fits for row in self._tried):
            self._try_smallest()
        fitting = [row for row in self._tried if row.fits]
        if fitting:
            tried = order(fitting, len(fitting))
            found.chosen = tried[0]
            found.reason = why(tried[0], tried[1], tried) if len(tried) > 1 else ""
            layouts = {row.candidate.layout for row in tried}
            others = (row for row in self._estimates if row.candidate.layout not in layouts)
            rest = [self._corrected(row) for row in others if _likeness(row.candidate) not in self._refused]
            more = order([row for row in rest if row.fits], max(0, self._wish.top - len(tried)))
            found.listed = [*tried[: self._wish.top], *more]
        else:
            if not self._tried:
                found.problems = list(self._reasons) or [
                    f"none of the layouts that divide {found.rows} row(s) can be had with --mode "
                    f"{', '.join(self._wish.modes)}; change --global-batch, or leave --mode out"
                ]
            found.closest = min(self._tried, key=lambda row: row.memory, default=None)
        found.runs = len(self._tried)
        return found

    def _classes(self) -> Iterator[list[Kind]]:
        """Precisions and recomputations that are alike to the ranking."""
        modes = sorted(self._wish.modes, key=lambda mode: mode == FP32)
        for _, alike in groupby(modes, key=lambda mode: mode == FP32):
            names = list(alike)
            for checkpoint in CHECKPOINTS:
                if checkpoint in self._facts.checkpoints:
                    yield [(mode, checkpoint) for mode in names]

    def _estimate(self, kinds: list[Kind]) -> None:
        wish, names = self._wish, ", ".join(dict.fromkeys(mode for mode, _ in kinds))
        again = "" if kinds[0][1] == "off" else f", activation_checkpoint {kinds[0][1]}"
        self._say(f"{names}{again}: dry runs of single ranks to estimate from")
        profiles, problems = find_profiles(kinds, self._workers, wish.model, wish.batch, self._facts, self._composes)
        self._found.notes += [f"{name} is left out: {problem}" for name, problem in problems.items()]
        self._reasons |= dict.fromkeys(problems.values())
        before = len(self._estimates)
        for (mode, checkpoint), profile in profiles.items():
            for candidate in choices.make_candidates(mode, checkpoint, self._meshes, self._found.rows, self._facts):
                if self._composes(candidate):
                    self._estimates.append(estimated(candidate, profile, self._facts, wish.limit))
        self._found.counted = len(self._estimates)
        self._say(f"{len(self._estimates) - before} candidates estimated")

    def _composes(self, candidate: Candidate) -> bool:
        """Whether the composition table has this; whatever the sizes are."""
        mesh = candidate.mesh
        tensor, pipeline, data = (1 + (size > 1) for size in (mesh.tensor, mesh.pipeline, mesh.data))
        small = Candidate(
            candidate.mode, Mesh(pipeline, data, tensor, 1), candidate.strategy, rows=2, microbatches=pipeline
        )
        if small not in self._composing:
            self._composing[small] = not check(small.config, pipeline * data * tensor, self._wish.device)
        return self._composing[small]

    def _try_best(self, kinds: list[Kind]) -> None:
        """Dry runs of the best of a class, a few at a time, until one fits with room."""
        rounds = 0
        while rounds < _ROUNDS and len(self._refused) < _MOST_REFUSED:
            rows = [self._corrected(row) for row in self._estimates if _kind(row) in kinds and self._is_new(row)]
            rows = [row for row in rows if row.fits]
            best, before = order(rows, _AT_ONCE), len(self._tried)
            for row in filter(self._is_new, best):  # one that is refused may take others of these with it
                self._try(row)
            rounds += len(self._tried) > before
            if not best or any(row.has_room and _kind(row) in kinds for row in self._tried):
                return

    def _is_new(self, row: Row) -> bool:
        tried = [other.candidate for other in self._tried]
        return row.candidate not in tried and _likeness(row.candidate) not in self._refused

    def _try(self, row: Row) -> None:
        self._say(f"dry run of {row.candidate}")
        wish, c = self._wish, row.candidate
        run = dry_run_with(self._workers, c.config, wish.world_size, wish.model, wish.batch, c.rows)
        if run.problems:
            self._refused.add(_likeness(c))
            self._reasons |= dict.fromkeys(run.problems)
            self._found.notes.append(f"{c}, and what is divided and called alike: {run.problems[0]}")
            return
        real = measured(row, run)
        family = _family(c)
        before = self._errors.get(family, 1.0)
        self._errors[family] = max(before, real.memory / row.memory * before)
        self._tried.append(real)

    def _corrected(self, row: Row) -> Row:
        """With what dry runs of such layouts have shown."""
        return replace(row, memory=row.memory * self._errors.get(_family(row.candidate), 1.0))

    def _try_smallest(self) -> None:
        """A dry run of what is estimated to need least; or, if it is refused, of the next."""
        for row in sorted(self._estimates, key=lambda row: row.memory):
            before = len(self._tried)
            if self._is_new(row):
                self._try(row)
            if len(self._tried) > before or len(self._refused) >= _MOST_REFUSED + _AT_ONCE:
                return


def _kind(row: Row) -> Kind:
    return row.candidate.mode, row.candidate.checkpoint


def _family(c: Candidate) -> tuple[object, ...]:
    return c.mode, c.checkpoint, c.strategy, c.mesh.pipeline > 1, c.schedule, c.passes > 1


def _likeness(c: Candidate) -> tuple[object, ...]:
    """What is refused alike: ranks have the same parts of the model, and call it with the same rows.

    Single ranks have shown that the precision and the recomputation work, so it is not these.
    """
    return c.mesh, c.strategy, c.rows // c.microbatches


def estimated(c: Candidate, profile: Profile, facts: ModelFacts, limit: int) -> Row:
    """What the rules say of a candidate."""
    found = estimate(c, profile, facts)
    return _row(c, found.memory, bubble(c), found.sent, limit)


def measured(row: Row, run: DryRun) -> Row:
    """What a dry run says of it."""
    c = row.candidate
    sizes = {"dp": c.mesh.data, "tp": c.mesh.tensor}
    sent: dict[str, float] = {}
    for figures in run.ranks.values():
        for axis in ("pp", "dp", "tp"):
            traffic = figures.traffic.get(axis)
            if traffic is not None:
                handed = float(traffic.bytes + traffic.reduced)
                size = ring(handed, sizes[axis]) if axis in sizes else handed
                sent[axis] = max(sent.get(axis, 0.0), size)
    return replace(_row(c, needed(run.largest[1]), run.bubble, sent, row.limit), run=run)


def _row(c: Candidate, memory: float, waits: float, sent: dict[str, float], limit: int) -> Row:
    across = sum(size * c.mesh.crossing(axis) for axis, size in sent.items())
    return Row(c, memory, waits, sum(sent.values()) - across, across, limit)
