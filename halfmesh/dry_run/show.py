"""Shows a dry run, and the search for a config, on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config.composition import Setup, find_advice
from ..engine.parallelize import make_plans
from ..errors import counted, readable
from ..parallel.registries import AXES, DATA_STRATEGIES
from ..report import mesh_picture
from .dry_run import DryRun, needed
from .model_spec import build_model
from .rungs import ROOM, Candidate, config_text, short
from .simulate_rank import PARTS
from .tracker import Tracker, dry_run_mode

if TYPE_CHECKING:
    from ..config import Config
    from .ladder import Ladder
    from .rungs import PlanRequest, Update


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
    """The dry run as a dict."""
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


_MOST_NOTES = 8
_RECOMPUTED = {
    "selective": "backward recomputes all but matrix products, convolutions and attention",
    "full": "backward runs each block's forward a second time: about a third more work",
}


def ladder_lines(ladder: Ladder, asked: PlanRequest) -> Iterator[str]:
    """The rungs, the reason why each does not fit, and the cost of the one that fits."""
    if ladder.update is None:
        yield f"{asked.model} cannot be simulated with the config as it is:"
        yield from (f"  {problem}" for problem in ladder.rungs[0].refused.splitlines())
        return
    yield (
        f"{counted(asked.world_size, 'rank')}, {ladder.update.rows} rows in an update; a rank may use "
        f"{readable(asked.room)} of {readable(asked.limit)}: a tenth is left to CUDA, NCCL and the allocator"
    )
    for number, rung in enumerate(ladder.rungs, 1):
        yield f"{number}. {' '.join(rung.changes) or 'the config as it is'}"
        yield f"     {_rung_verdict(rung, asked)}"
    if len(ladder.notes) > _MOST_NOTES:
        notes = [*ladder.notes[:_MOST_NOTES], f"{len(ladder.notes) - _MOST_NOTES} more are left out; --json has all"]
    else:
        notes = ladder.notes
    yield from (f"note: {note}" for note in notes)
    if ladder.chosen is None:
        yield (
            "nothing fits. Use more ranks, devices with more memory, or shorter inputs. Offloading "
            "(activation_offload, parallel.data.cpu_offload) is not tried, because a dry run cannot tell host from "
            "device memory"
        )
        return
    if ladder.chosen.run is not None:
        yield from (f"note: {note}" for note in ladder.chosen.run.notes)
    yield "cost:"
    yield from (f"  {cost}" for cost in costs(ladder.chosen, ladder.update))
    yield from (f"advice: {finding}" for finding in find_advice(Setup.of(ladder.chosen.config, asked.world_size)))
    yield ""
    yield from config_text(ladder.chosen, asked, ladder.update).splitlines()


def _rung_verdict(rung: Candidate, asked: PlanRequest) -> str:
    if rung.refused:
        return f"cannot run: {'; '.join(rung.refused.splitlines())}"
    assert rung.run is not None
    rank, figures = rung.run.largest
    parts = sorted(figures.parts.items(), key=lambda part: -part[1])[:2]
    most = ", ".join(f"{name} {readable(size)}" for name, size in parts)
    if rung.needs <= asked.room:
        return f"fits: rank {rank} needs {readable(rung.needs)}; most of it {most}"
    if figures.peak is None:
        return (
            f"does not fit: rank {rank} keeps {readable(rung.needs)} between updates, without gradients and "
            f"activations; most of it {most}"
        )
    state = ""
    if rung.state > asked.room:
        state = f" ({readable(rung.state)} of it depends neither on the batch nor on recomputation)"
    return f"does not fit: rank {rank} needs {readable(rung.needs)}{state}; most of it {most}"


def costs(rung: Candidate, update: Update) -> Iterator[str]:
    """The costs of a rung: communication, waiting and recomputation."""
    config, run = rung.config, rung.run
    assert run is not None
    used = {AXES.get(name).dim: (f"parallel.{name}", AXES.get(name).cost) for name in config.parallel.sizes}
    strategy = config.parallel.data.strategy
    used["dp"] = (f"parallel.data.strategy={strategy}", DATA_STRATEGIES.get(strategy).cost or "gradients are summed")
    sent: dict[str, tuple[int, int]] = {}
    for figures in run.ranks.values():
        for axis, traffic in figures.traffic.items():
            sent[axis] = max(sent.get(axis, (0, 0)), (traffic.bytes, traffic.messages))
    for axis, (size, messages) in sent.items():
        if axis in used:
            key, cost = used[axis]
            yield f"{key}: a rank sends {readable(size)} in {messages} messages per update; {cost}"
    if not sent:
        yield "nothing is sent between ranks"
    if run.bubble:
        yield f"bubble: a stage waits {run.bubble:.0%} of a step; more rows per update reduce it"
    if rung.recompute:
        yield f"activation_checkpoint={rung.recompute}: {_RECOMPUTED[rung.recompute]}"
    now, before = update.rows // run.sizes["dp"] // rung.passes, update.at_once
    if now < before:
        yield f"batches: {counted(now, 'row')} at once through the model instead of {before}: smaller matrix products"


def ladder_as_json(ladder: Ladder, asked: PlanRequest) -> dict[str, Any]:
    """The search as a dict, with exact numbers."""
    chosen = ladder.chosen
    advice = find_advice(Setup.of(chosen.config, asked.world_size)) if chosen else ()
    return {
        "ok": chosen is not None,
        "world_size": asked.world_size,
        "limit": asked.limit,
        "room": ROOM,
        "rows_per_update": ladder.update.rows if ladder.update else None,
        "rungs": [_rung_as_json(rung) for rung in ladder.rungs],
        "notes": ladder.notes,
        "chosen": None if chosen is None else _rung_as_json(chosen) | {"config": short(chosen.config.to_dict())},
        "costs": list(costs(chosen, ladder.update)) if chosen and ladder.update else [],
        "advice": list(map(str, advice)),
    }


def _rung_as_json(rung: Candidate) -> dict[str, Any]:
    figures = rung.run.largest[1] if rung.run and rung.run.ranks else None
    return {
        "changes": list(rung.changes),
        "batch_rows": rung.rows,
        "refused": rung.refused,
        "needs": rung.needs,
        "bytes": figures.parts if figures else {},
        "update_simulated": figures is not None and figures.peak is not None,
        "bubble": rung.run.bubble if rung.run else 0.0,
    }
