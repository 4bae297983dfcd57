"""What a search has found, in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import readable
from ..key_checks import find_advice
from .ranking import CRITERIA, Row, find_best
from .writing import short

if TYPE_CHECKING:
    from .search import Found, Wish

_MOST_REASONS = 5
_TITLES = ("", "", "memory", "bubble", "between nodes", "within a node", "")


def lines(found: Found, wish: Wish) -> Iterator[str]:
    """The list of the best, and why the first is the first."""
    if found.problems:
        yield f"nothing of this can be run, with any memory, so there is nothing to compare; {found.counted} candidates"
        yield from (f"  {problem}" for problem in found.problems[:_MOST_REASONS])
        return
    yield (
        f"{found.counted} candidates on {wish.world_size} rank(s), {wish.node} to a node, each with {found.rows} rows "
        f"in an update; {found.runs} dry run(s)"
    )
    for note in found.notes:
        yield f"  {note}"
    if found.chosen is None:
        yield f"nothing fits into {readable(wish.limit)}"
        if found.closest is not None:
            kind = "dry run" if found.closest.run else "estimate"
            over = found.closest.memory - wish.limit
            yield f"  closest, by {kind}: {found.closest.candidate}"
            yield f"  needs {readable(found.closest.memory)}, {readable(over)} too much"
        return
    rows = [_cells(row, is_best) for row, is_best in zip(found.listed, find_best(found.listed), strict=True)]
    widths = [max(map(len, column)) for column in zip(_TITLES, *rows, strict=True)]
    for cells in (_TITLES, *rows):
        padded = [cell.rjust(width) for cell, width in zip(cells[:-1], widths[:-1], strict=True)]
        yield f"  {'  '.join(padded)}  {cells[-1]}".rstrip()
    yield "  *: no other of these is as good in memory, bubble, what is computed again, and bytes, and better in one"
    yield "  memory: of the rank that needs most. bytes: what a rank sends in an update, at most"
    yield "ranked by, in this order: " + "; ".join(criterion.name for criterion in CRITERIA)
    yield f"chosen: {found.chosen.candidate}"
    if found.reason:
        yield f"  before the second by {found.reason}"
    yield from (f"  advice: {finding}" for finding in _advice(found.chosen))
    if not found.chosen.has_room:
        yield f"  it fits, with less than a tenth to spare: {readable(found.chosen.memory)} of {readable(wish.limit)}"


def _advice(row: Row) -> list[str]:
    """What `check` would say of a config: keys that are not searched, and could do better."""
    return [str(finding) for finding in find_advice(row.candidate.config)]


def _cells(row: Row, is_best: bool) -> tuple[str, ...]:
    numbers = (readable(row.memory), f"{row.bubble:.1%}", readable(row.across), readable(row.within))
    return ("*" if is_best else "", "dry run" if row.run else "estimate", *numbers, str(row.candidate))


def as_json(found: Found, wish: Wish) -> dict[str, Any]:
    """The same, exactly."""
    best = find_best(found.listed)
    return {
        "ok": found.chosen is not None,
        "world_size": wish.world_size,
        "limit": wish.limit,
        "global_batch": found.rows,
        "candidates": found.counted,
        "dry_runs": found.runs,
        "notes": found.notes,
        "problems": found.problems,
        "reason": found.reason,
        "chosen": None if found.chosen is None else _row(found.chosen),
        "advice": [] if found.chosen is None else _advice(found.chosen),
        "closest": None if found.closest is None else _row(found.closest),
        "listed": [_row(row) | {"not_dominated": is_best} for row, is_best in zip(found.listed, best, strict=True)],
    }


def _row(row: Row) -> dict[str, Any]:
    c = row.candidate
    return {
        "config": short(c.config.to_dict()),
        "mesh": {"pp": c.mesh.pipeline, "dp": c.mesh.data, "tp": c.mesh.tensor},
        "batch_rows": c.rows,
        "is_estimate": row.run is None,
        "memory": round(row.memory),
        "fits": row.fits,
        "bubble": row.bubble,
        "sent_within_node": round(row.within),
        "sent_between_nodes": round(row.across),
    }
