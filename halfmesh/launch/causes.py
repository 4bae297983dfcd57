"""Which rank is the reason that the others lost a connection or waited in vain."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .end_log import End, Ends
from .layout import Layout


@dataclass(frozen=True)
class Cause:
    """A reason, as the second half of a sentence; `certain` if it is no use to wait for more to become known.

    `asks`: where the ranks are tells more.
    """

    text: str
    certain: bool
    asks: bool = False


def find_cause(ends: Ends, layout: Layout, waiting: Collection[int] = ()) -> Cause:
    """Say why ranks that lost a connection or timed out did so. `waiting`: ranks that are known to wait, too.

    Once one has timed out, all end, also those that it waited for: how they do is not the reason any more, unless they
    have an error of their own.
    """
    ranks = list(ends.of_rank)
    timeouts = [place for place, rank in enumerate(ranks) if ends.of_rank[rank] is End.TIMED_OUT]
    before = ranks[: timeouts[0]] if timeouts else ranks
    failed, interrupted = (_with(ends, end, ranks) for end in (End.FAILED, End.INTERRUPTED))
    killed, finished = (_with(ends, end, before) for end in (End.KILLED, End.FINISHED))
    if failed:
        return Cause(f"the first error was:\n{ends.first_error}", certain=True)
    if interrupted:
        return Cause(f"interrupted (Ctrl-C): {layout.names(interrupted)}", certain=True)
    if killed:
        said = f"{layout.names(killed)} ended without an error of its own (killed, out of memory?)"
        return Cause(said, certain=True)
    if finished:
        said = f"{layout.names(finished)} ended without an error while others waited for it"
        said = f"{said} (left its loop early, or called engine.close alone?)"
        return Cause(said, certain=True, asks=True)
    victims = (End.LOST, End.TIMED_OUT)
    missing = [
        rank for rank in range(layout.world_size) if ends.of_rank.get(rank) not in victims and rank not in waiting
    ]
    return _hung(missing, layout) if timeouts else _unknown(missing, ranks, layout)


def _hung(missing: list[int], layout: Layout) -> Cause:
    if missing:
        return Cause(f"not waiting, so likely hanging (or slower than that): {layout.names(missing)}", False, asks=True)
    said = "all ranks do, so they wait in different collectives: each has to run the same ones, in the same order"
    return Cause(said, certain=True, asks=True)


def _unknown(missing: list[int], ranks: list[int], layout: Layout) -> Cause:
    if missing:
        said = f"not heard of, so likely the reason (killed, out of memory?): {layout.names(missing)}"
        return Cause(said, certain=False)
    return Cause(f"no rank left an error of its own; the first to end was {layout.name(ranks[0])}", certain=True)


def _with(ends: Ends, end: End, ranks: list[int]) -> list[int]:
    return [rank for rank in ranks if ends.of_rank[rank] is end]
