"""Where the ranks are, for the message about one that waited in vain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .end_log import End
from .layout import Layout
from .positions import ENDED, RUNS, WAITS, Position

_NAMED = 4
"""Ranks that are named with their places; of more, the numbers are given."""


def report(positions: Mapping[int, Position], ends: Mapping[int, End], layout: Layout) -> str:
    """Lines, one for each place at which ranks are, that begin with a title.

    Args:
        positions: of the ranks that have answered.
        ends: of all ranks, as the log has them.
    """
    alike: dict[str, list[int]] = {}
    for rank in range(layout.world_size):
        alike.setdefault(_words(positions.get(rank), ends.get(rank)), []).append(rank)
    lines = [f"  {_names(ranks, layout)}: {words}" for words, ranks in alike.items()]
    return "\n".join(["Where the ranks are:", *lines, *_conclusions(positions.values())])


def waiting(positions: Mapping[int, Position]) -> set[int]:
    """The ranks that wait for another one, and do nothing else meanwhile."""
    return {rank for rank, position in positions.items() if position.state == WAITS and not position.beside}


def _words(position: Position | None, end: End | None) -> str:
    if position is not None:
        return f"{position}   <- not waiting" if position.state == RUNS else str(position)
    if end is End.KILLED:
        return "its process is gone"
    if end is End.FINISHED:
        return ENDED
    return "no answer (stopped, or its machine is lost)"


def _conclusions(positions: Iterable[Position]) -> list[str]:
    known = list(positions)
    found = []
    if len({position.updates for position in known if position.updates}) > 1:
        found.append("They are not at the same update.")
    if waiting(dict(enumerate(known))) == set(range(len(known))) and len({(p.call, p.line) for p in known}) > 1:
        found.append("They wait in different places: each rank has to run the same collectives, in the same order.")
    return found


def _names(ranks: list[int], layout: Layout) -> str:
    if len(ranks) == 1 or (layout.has_places and len(ranks) <= _NAMED):
        return layout.names(ranks)
    return f"ranks {', '.join(_runs(ranks))}"


def _runs(ranks: list[int]) -> list[str]:
    """Numbers that follow each other as "3-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
