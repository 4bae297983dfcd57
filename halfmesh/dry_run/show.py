"""Output of `halfmesh check` and `halfmesh plan`: a dry run in words, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config.composition import Setup
from ..engine.parallel_plans import make_plans
from ..errors import readable
from ..report import mesh_picture
from .dry_run import DryRun, needed
from .model_spec import build_model
from .simulate_rank import PARTS
from .tracker import Tracker, dry_run_mode

if TYPE_CHECKING:
    from ..config import Config


def lines(run: DryRun, limit: int | None) -> Iterator[str]:
    """A table of the ranks, their communication, and the verdict if they fit."""
    ranks = list(run.ranks.items())
    stages = run.sizes["pp"] > 1
    names = [f"rank {rank}" + (f", stage {run.stage_of(rank)}" if stages else "") for rank, _ in ranks]
    how = "" if run.extrapolated is None else "; extrapolated from {} and {} microbatches".format(*run.extrapolated)
    yield f"  one update with AdamW, on tensors without memory{how}"
    table: list[tuple[str, list[str]]] = [("bytes, each part at its largest", names)]
    for part in PARTS:
        found = [figures.parts.get(part) for _, figures in ranks]
        table.append((part, ["?" if size is None else readable(size) for size in found]))
    table.append(("between two updates", [readable(figures.kept) for _, figures in ranks]))
    table.append(("peak", ["?" if figures.peak is None else readable(figures.peak) for _, figures in ranks]))
    axes = {axis for _, figures in ranks for axis in figures.traffic}
    for axis in sorted(axes, key=lambda axis: (axis == "all", axis)):
        sent = [figures.traffic.get(axis) for _, figures in ranks]
        cells = ["-" if one is None else f"{one.messages} x, {readable(one.bytes)}" for one in sent]
        table.append((f"sent over {axis if axis != 'all' else 'all ranks'}", cells))
    width = max(len(title) for title, _ in table)
    columns = [max(len(cells[i]) for _, cells in table) for i in range(len(names))]
    for title, cells in table:
        padded = "  ".join(cell.rjust(size) for cell, size in zip(cells, columns, strict=True))
        yield f"  {title:<{width}}  {padded}"
    if stages:
        yield f"  bubble {run.bubble:.0%}: the share of a step in which a stage waits"
    for note in run.notes:
        yield f"  note: {note}"
    if limit is not None:
        yield from _verdict(run, limit)


def as_json(run: DryRun, limit: int | None) -> dict[str, Any]:
    """The same as a dict."""
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
    }


def fits(run: DryRun, limit: int) -> bool:
    """Return True if the largest rank fits into `limit` bytes."""
    return needed(run.largest[1]) <= limit


def _verdict(run: DryRun, limit: int) -> Iterator[str]:
    rank, figures = run.largest
    size = needed(figures)
    of = f"rank {rank} needs {readable(size)} of {readable(limit)}"
    if size <= limit:
        yield f"  fits: {of}, besides what the device and its allocator need for themselves"
    else:
        over = readable(size - limit)
        yield f"  does not fit: {of}, {over} too much; halfmesh plan finds the simplest change that does"


def draw(
    path: Path, config: Config, run: DryRun, model: str, batch: tuple[str, ...] = (), node: int | None = None
) -> None:
    """Draw the mesh of `config` into `path`.

    Args:
        run: a dry run of this config, with the bytes of one rank for some stages.
        node: devices per node, if known.
    """
    held = _held_modules(config, model, batch)
    needs = {run.stage_of(rank): readable(needed(figures)) for rank, figures in run.ranks.items()}

    def describe(rank: int) -> list[str]:
        stage = run.stage_of(rank)
        blocks = ", ".join(mesh_picture.compress(held[stage]))
        return [blocks, mesh_picture.describe_shards(config.parallel, run.sizes, rank), needs.get(stage, "")]

    path.write_text(mesh_picture.draw(run.sizes, describe, node), encoding="utf-8")


def _held_modules(config: Config, reference: str, batch: tuple[str, ...]) -> list[list[str]]:
    """For each stage, the blocks (and other modules, by their first name) whose parameters it holds, by the partition
    that a run would use."""
    with dry_run_mode(), Tracker():
        model = build_model(reference, batch).model
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        stages = config.parallel.pipeline.size
        if stages == 1:
            return [_modules(names)]
        setup = Setup.of(config, stages * config.parallel.tensor.size)
        partition = make_plans(model, torch.optim.AdamW(model.parameters()), None, None, setup).partition
        assert partition is not None
        ranks_of = {name: partition.ranks_of(name) for name in names}
        return [_modules(name for name in names if rank in ranks_of[name]) for rank in range(stages)]


def _modules(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(mesh_picture.block_of, names)))
