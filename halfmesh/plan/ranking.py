"""Which of several choices is first, and why. Nothing here is a time: what is compared can be counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import readable
from .candidates import CHECKPOINTS, FP32, STRATEGIES, Candidate
from .dry_run import DryRun

ROOM = 0.9
"""The part of a device's memory up to which a choice has room: the device's context, NCCL's buffers and the allocator's
gaps come on top."""


@dataclass(frozen=True)
class Row:
    """A choice with its figures.

    Attributes:
        memory: bytes that the largest rank needs.
        bubble: the part of a step in which a stage waits.
        within, across: bytes that a rank sends in an update, at most, within its node and to others.
        limit: bytes that a device has.
        run: the dry run that the figures are from; None: they are estimates.
    """

    candidate: Candidate
    memory: float
    bubble: float
    within: float
    across: float
    limit: int
    run: DryRun | None = field(default=None, compare=False, repr=False)

    @property
    def fits(self) -> bool:
        """Whether a device has enough."""
        return self.memory <= self.limit

    @property
    def has_room(self) -> bool:
        """Whether it has some more."""
        return self.memory <= ROOM * self.limit


@dataclass(frozen=True)
class Criterion:
    """Smaller is better. Those that are worse than the best by no more than a tolerance are as good.

    Attributes:
        name: what is compared, as in "fewer bytes between nodes".
        show: a value in words.
        more, times: the tolerance: so much more, or so many times as much.
    """

    name: str
    value: Callable[[Row], float]
    show: Callable[[Row], str]
    more: float = 0.0
    times: float = 1.0

    def keep(self, rows: Sequence[Row]) -> list[Row]:
        """Those as good as the best."""
        best = min(map(self.value, rows))
        return [row for row in rows if self.value(row) <= best * self.times + self.more]


def _simplicity(row: Row) -> float:
    c = row.candidate
    return STRATEGIES.index(c.strategy) + 2 * (c.mesh.tensor > 1) + 2 * (c.mesh.pipeline > 1) + (c.chunks > 1)


def _mode(row: Row) -> float:
    """As docs/precision.md recommends them: under torch weights, buffers and norms stay in fp32."""
    return 0 if row.candidate.mode.startswith("torch") else 1


CRITERIA = (
    Criterion(
        f"room: {1 - ROOM:.0%} of the memory left", lambda r: not r.has_room, lambda r: f"{r.memory / r.limit:.0%} used"
    ),
    Criterion("half precision", lambda r: r.candidate.mode == FP32, lambda r: r.candidate.mode),
    Criterion(
        "less computed again", lambda r: CHECKPOINTS.index(r.candidate.checkpoint), lambda r: r.candidate.checkpoint
    ),
    Criterion("a smaller bubble", lambda r: r.bubble, lambda r: f"{r.bubble:.1%}", more=0.02),
    Criterion("fewer bytes between nodes", lambda r: r.across, lambda r: readable(r.across), times=2.0),
    Criterion("mode torch", _mode, lambda r: r.candidate.mode),
    Criterion("fewer bytes in all", lambda r: r.across + r.within, lambda r: readable(r.across + r.within), times=1.1),
    Criterion("fewer passes through the model", lambda r: r.candidate.passes, lambda r: f"{r.candidate.passes}"),
    Criterion("a simpler layout", _simplicity, lambda r: str(r.candidate)),
    Criterion("less memory", lambda r: r.memory, lambda r: readable(r.memory)),
)
"""In this order: each leaves those that are as good as the best, and the next one looks at these."""


def order(rows: Sequence[Row], count: int, criteria: Sequence[Criterion] = CRITERIA) -> list[Row]:
    """The first `count` of `rows`, each layout once, with the batch that suits it best."""
    left = list(rows)
    found: list[Row] = []
    while left and len(found) < count:
        first = pick(left, criteria)
        found.append(first)
        left = [row for row in left if row.candidate.layout != first.candidate.layout]
    return found


def pick(rows: Sequence[Row], criteria: Sequence[Criterion] = CRITERIA) -> Row:
    """The first of `rows`."""
    left = list(rows)
    for criterion in criteria:
        left = criterion.keep(left)
    return left[0]


def why(first: Row, second: Row, rows: Sequence[Row], criteria: Sequence[Criterion] = CRITERIA) -> str:
    """Why `first` is before `second`, where all of `rows` are compared."""
    left = list(rows)
    for criterion in criteria:
        left = criterion.keep(left)
        if second not in left:
            return f"{criterion.name}: {criterion.show(first)}, not {criterion.show(second)}"
    return "nothing that is compared tells them apart"


def find_best(rows: Sequence[Row]) -> list[bool]:
    """Of each row whether no other is as good in everything, and better in something: memory, bubble, what is computed
    again, bytes between nodes and within them."""

    def values(row: Row) -> tuple[float, ...]:
        checkpoint = CHECKPOINTS.index(row.candidate.checkpoint)
        return row.memory, row.bubble, checkpoint, row.across, row.within

    def beats(one: Row, other: Row) -> bool:
        pairs = list(zip(values(one), values(other), strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    return [not any(beats(other, row) for other in rows) for row in rows]
