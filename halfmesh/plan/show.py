"""A plan in words, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import readable
from .dry_run import DryRun, needed
from .rehearsal import PARTS

if TYPE_CHECKING:
    from .advice import Change


def lines(run: DryRun, limit: int | None, change: Change | None) -> Iterator[str]:
    """A table of the ranks, what they send, and whether they fit."""
    ranks = list(run.ranks.items())
    stages = run.layout.pipeline > 1
    names = [f"rank {rank}" + (f", stage {run.stage_of(rank)}" if stages else "") for rank, _ in ranks]
    yield f"  one update with AdamW, on tensors without memory{_how(run)}"
    table: list[tuple[str, list[str]]] = [("bytes, each part at its largest", names)]
    for part in PARTS:
        found = [figures.parts.get(part) for _, figures in ranks]
        table.append((part, ["?" if size is None else readable(size) for size in found]))
    table.append(("between two updates", [readable(figures.kept) for _, figures in ranks]))
    table.append(("peak", ["?" if figures.peak is None else readable(figures.peak) for _, figures in ranks]))
    axes = [axis for axis in ("dp", "tp", "pp", "all") if any(axis in figures.traffic for _, figures in ranks)]
    for axis in axes:
        sent = [figures.traffic.get(axis) for _, figures in ranks]
        cells = ["-" if one is None else f"{one.messages} x, {readable(one.bytes)}" for one in sent]
        table.append((f"sent over {axis if axis != 'all' else 'all ranks'}", cells))
    width = max(len(title) for title, _ in table)
    columns = [max(len(cells[i]) for _, cells in table) for i in range(len(names))]
    for title, cells in table:
        padded = "  ".join(cell.rjust(size) for cell, size in zip(cells, columns, strict=True))
        yield f"  {title:<{width}}  {padded}"
    if stages:
        yield f"  bubble {run.bubble:.0%}: that part of a step a stage waits"
    for note in run.notes:
        yield f"  not known: {note}" if "not known" in note else f"  left out: {note}"
    if limit is not None:
        yield from _verdict(run, limit, change)


def as_json(run: DryRun, limit: int | None, change: Change | None) -> dict[str, Any]:
    """The same."""
    ranks = [
        {
            "rank": rank,
            "stage": run.stage_of(rank),
            "parameters": figures.numel,
            "bytes": figures.parts,
            "kept": figures.kept,
            "peak": figures.peak,
            "sent": {axis: {"messages": t.messages, "bytes": t.bytes} for axis, t in figures.traffic.items()},
        }
        for rank, figures in run.ranks.items()
    ]
    return {
        "ranks": ranks,
        "bubble": run.bubble,
        "microbatches_run": run.extrapolated,
        "notes": run.notes,
        "limit": limit,
        "fits": None if limit is None else fits(run, limit),
        "change": None
        if change is None
        else {"what": change.what, "bytes": round(change.bytes), "is_estimate": change.is_estimate},
    }


def fits(run: DryRun, limit: int) -> bool:
    """Whether the largest rank has enough with `limit` bytes."""
    return needed(run.largest[1]) <= limit


def _how(run: DryRun) -> str:
    if run.extrapolated is None:
        return ""
    return f"; {run.extrapolated[0]} and {run.extrapolated[1]} microbatches were run, the others follow from them"


def _verdict(run: DryRun, limit: int, change: Change | None) -> Iterator[str]:
    rank, figures = run.largest
    size = needed(figures)
    of = f"rank {rank} needs {readable(size)} of {readable(limit)}"
    if size <= limit:
        yield f"  fits: {of}, besides what the device and its allocator need for themselves"
        return
    yield f"  does not fit: {of}, {readable(size - limit)} too much"
    if change is not None:
        how = "an estimate" if change.is_estimate else "a dry run"
        yield f"  would fit: {change.what}, by {how} of {readable(change.bytes)}"
    else:
        yield (
            "  none of zero1, activation_checkpoint, smaller batches, fsdp, or more tensor or pipeline ranks would be "
            "enough by itself; halfmesh plan searches all of them together"
        )
