"""Shows a dry run, and the search for a config, on the terminal and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config.composition import Setup, find_advice
from ..engine.parallelize import make_plans
from ..errors import counted, readable
from ..parallel.registries import AXES, DATA_STRATEGIES
from ..report import mesh_picture
from .candidates import ROOM, UNCHANGED, Candidate, PlanRequest, Update, both_units, config_text
from .dry_run import DryRun
from .model_spec import build_model
from .simulate_rank import CATEGORIES
from .tracker import Tracker, dry_run_mode

if TYPE_CHECKING:
    from ..config import Config
    from .ladder import Ladder

_MOST_NOTES = 8
_NOTHING_FITS = (
    "nothing fits. Use more ranks, devices with more memory, or shorter inputs. halfmesh plan does not try offloading "
    "(activation_offload, parallel.data.cpu_offload), because a simulation cannot tell host memory from device memory"
)
_RECOMPUTED = {
    "selective": "backward recomputes everything except matrix products, convolutions and attention",
    "full": "backward runs each block's forward again, which is about a third more work",
}


COMMUNICATOR_BYTES = 100 * 2**20, 700 * 2**20
"""The likely memory of NCCL's buffers of one communicator, from and to. A channel to a neighbour has 9 MiB
(NCCL_BUFFSIZE, 4 MiB, and those of the protocols LL and LL128: NCCL's device.h), and there are up to 32 channels. 688
MB were measured on four A100 over NVLink (https://github.com/NVIDIA/nccl/issues/964), before NCCL 2.22, which
connects only what is used."""


def lines(run: DryRun, limit: int | None, device: str = "cuda") -> Iterator[str]:
    """A table of the ranks and their communication; and whether they fit on a `device` of `limit` bytes."""
    ranks, stages = run.ranks.values(), run.dims.pp > 1
    names = [f"rank {rank}" + (f", stage {run.stage_of(rank)}" if stages else "") for rank in run.ranks]
    how = "" if run.extrapolated is None else "; extrapolated from {} and {} microbatches".format(*run.extrapolated)
    batch = f", batches of {counted(run.rows, 'row')} per data rank" if run.rows else ""
    yield f"  one update with AdamW{batch}, without allocating memory{how}"
    table = [["bytes, each part at its largest", *names]]
    table += [[category, *(_size(figures.bytes.get(category)) for figures in ranks)] for category in CATEGORIES]
    table.append(["between two updates", *(_size(figures.kept) for figures in ranks)])
    table.append(["peak", *(_size(figures.peak) for figures in ranks)])
    for axis in sorted({axis for figures in ranks for axis in figures.sent}, key=lambda axis: (axis == "all", axis)):
        sent = [figures.sent.get(axis) for figures in ranks]
        cells = ["-" if one is None else f"{one.messages} x, {readable(one.bytes)}" for one in sent]
        table.append([f"sent over {axis if axis != 'all' else 'all ranks'}", *cells])
    width, *widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for title, *cells in table:
        yield "  ".join(["", f"{title:<{width}}", *map(str.rjust, cells, widths)])
    if stages:
        yield f"  bubble {run.bubble:.0%}: the share of a step in which a stage waits"
    yield from (f"  note: {note}" for note in (*run.notes, *communicator_notes(run, device)))
    if limit is not None:
        rank, figures = run.largest
        of = f"rank {rank} needs {readable(figures.needed)} of {both_units(limit)}"
        if fits(run, limit):
            yield f"  fits: {of}, plus what the device and its allocator need"
        else:
            over = readable(figures.needed - limit)
            yield f"  does not fit: {of}, {over} too much. halfmesh plan finds the simplest change that fits"


def communicator_notes(run: DryRun, device: str) -> Iterator[str]:
    """The memory that NCCL's buffers are likely to take of a GPU; no dry run counts them."""
    most = (
        () if device != "cuda" else max((figures.communicators for figures in run.ranks.values()), key=len, default=())
    )
    if most:
        names = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in Counter(most).items())
        least, largest = (readable(len(most) * size) for size in COMMUNICATOR_BYTES)
        yield f"NCCL's buffers take another {least} to {largest}, for {counted(len(most), 'communicator')} ({names})"


def _size(size: int | None) -> str:
    return "?" if size is None else readable(size)


def as_json(run: DryRun, limit: int | None) -> dict[str, Any]:
    """The dry run as a dict."""
    return {
        "ranks": [{"rank": rank, "stage": run.stage_of(rank), **asdict(found)} for rank, found in run.ranks.items()],
        "batch_rows": run.rows or None,
        "bubble": run.bubble,
        "microbatches_run": run.extrapolated,
        "notes": run.notes,
        "limit": limit,
        "fits": None if limit is None else fits(run, limit),
    }


def fits(run: DryRun, limit: int) -> bool:
    """Return True if the largest rank fits into `limit` bytes."""
    return run.largest[1].needed <= limit


def draw(
    path: Path, config: Config, run: DryRun, model: str, batch: tuple[str, ...] = (), node: int | None = None
) -> None:
    """Draw the mesh of `config` into `path`.

    Args:
        run: a dry run of this config, with the bytes of one rank for some stages.
        node: devices per node, if known.
    """
    held = _held_modules(config, model, batch)
    needs = {run.stage_of(rank): readable(figures.needed) for rank, figures in run.ranks.items()}

    def describe(rank: int) -> list[str]:
        stage = run.stage_of(rank)
        blocks = ", ".join(mesh_picture.compress(held[stage]))
        return [blocks, mesh_picture.describe_shards(config.parallel, run.dims, rank), needs.get(stage, "")]

    path.write_text(mesh_picture.draw(run.dims.sizes, describe, node), encoding="utf-8")


def _held_modules(config: Config, reference: str, batch: tuple[str, ...]) -> list[Iterable[str]]:
    """For each stage, the blocks (and other modules, by their first name) whose parameters it holds, by the partition
    that a run would use."""
    stages = config.parallel.pipeline.size
    with dry_run_mode(), Tracker():
        model = build_model(reference, batch).model
        setup = Setup.of(config, stages * config.parallel.tensor.size)
        partition = make_plans(model, torch.optim.AdamW(model.parameters()), None, None, setup).partition
        held: list[dict[str, None]] = [{} for _ in range(stages)]
        for name, _ in model.named_parameters(remove_duplicate=False):
            for stage in (0,) if partition is None else partition.ranks_of(name):
                held[stage][mesh_picture.block_of(name)] = None
    return list(held)


def ladder_lines(ladder: Ladder, asked: PlanRequest) -> Iterator[str]:
    """The options, the reason why each does not fit, and the cost of the one that fits."""
    if ladder.update is None:
        yield f"{asked.model} cannot be simulated with the config as it is:"
        yield from (f"  {problem}" for problem in ladder.candidates[0].rejected.splitlines())
        return
    yield (
        f"{counted(asked.world_size, 'rank')}, batches of {counted(ladder.candidates[0].rows or 0, 'row')} per data "
        f"rank, {ladder.update.rows} rows in an update"
    )
    yield (
        f"a rank may use {readable(asked.room)} of {both_units(asked.limit)}: {1 - ROOM:.0%} is reserved for CUDA, "
        "NCCL and the allocator"
    )
    for number, candidate in enumerate(ladder.candidates, 1):
        yield f"{number}. {' '.join(candidate.changes) or UNCHANGED}"
        yield f"     {_outcome(candidate, asked)}"
    yield from (f"note: {note}" for note in ladder.notes[:_MOST_NOTES])
    if len(ladder.notes) > _MOST_NOTES:
        yield f"note: {len(ladder.notes) - _MOST_NOTES} more notes; --json has all"
    chosen = ladder.chosen
    if chosen is None or chosen.run is None:
        yield _NOTHING_FITS
        return
    yield from (f"note: {note}" for note in (*chosen.run.notes, *communicator_notes(chosen.run, asked.device)))
    yield "cost:"
    yield from (f"  {cost}" for cost in costs(chosen, ladder.update))
    yield from (f"advice: {finding}" for finding in find_advice(Setup.of(chosen.config, asked.world_size)))
    yield ""
    yield from config_text(chosen, asked, ladder.update).splitlines()


def _outcome(candidate: Candidate, asked: PlanRequest) -> str:
    if candidate.rejected or candidate.run is None:
        return f"cannot run: {'; '.join(candidate.rejected.splitlines())}"
    rank, figures = candidate.run.largest
    largest = sorted(figures.bytes.items(), key=lambda item: -item[1])[:2]
    most = "; the largest parts are " + ", ".join(f"{name} {readable(size)}" for name, size in largest)
    if candidate.needs <= asked.room:
        return f"fits: rank {rank} needs {readable(candidate.needs)}{most}"
    if figures.peak is None:
        kept = f"keeps {readable(candidate.needs)} between updates, without gradients and activations"
        return f"does not fit: rank {rank} {kept}{most}"
    state = ""
    if candidate.state > asked.room:
        state = f" ({readable(candidate.state)} of it does not depend on the batch or on recomputation)"
    return f"does not fit: rank {rank} needs {readable(candidate.needs)}{state}{most}"


def costs(candidate: Candidate, update: Update) -> Iterator[str]:
    """The costs of an option: communication, waiting and recomputation."""
    config, run = candidate.config, candidate.run
    assert run is not None
    used = {AXES.get(name).dim: (f"parallel.{name}", AXES.get(name).cost) for name in config.parallel.sizes}
    strategy = config.parallel.data.strategy
    used["dp"] = (f"parallel.data.strategy={strategy}", DATA_STRATEGIES.get(strategy).cost or "gradients are summed")
    sent: dict[str, tuple[int, int]] = {}
    for figures in run.ranks.values():
        for axis, traffic in figures.sent.items():
            sent[axis] = max(sent.get(axis, (0, 0)), (traffic.bytes, traffic.messages))
    for axis, (size, messages) in sent.items():
        if axis in used:
            key, cost = used[axis]
            yield f"{key}: a rank sends {readable(size)} in {counted(messages, 'message')} per update; {cost}"
    if not sent:
        yield "ranks send nothing to each other"
    if run.bubble:
        yield f"bubble: a stage waits for {run.bubble:.0%} of a step; more rows per update reduce it"
    if candidate.recompute:
        yield f"activation_checkpoint={candidate.recompute}: {_RECOMPUTED[candidate.recompute]}"
    now, before = update.rows // run.dims.dp // candidate.passes, update.at_once
    if now < before:
        yield f"batches: {counted(now, 'row')} at a time through the model, not {before}; matrix products are smaller"


def ladder_as_json(ladder: Ladder, asked: PlanRequest) -> dict[str, Any]:
    """The search as a dict, with exact numbers."""
    chosen, update = ladder.chosen, ladder.update
    answer: dict[str, Any] = {
        "ok": chosen is not None,
        "world_size": asked.world_size,
        "limit": asked.limit,
        "usable": ROOM,
        "batch_rows": ladder.candidates[0].rows,
        "rows_per_update": update.rows if update else None,
        "options": [_candidate_as_json(candidate) for candidate in ladder.candidates],
        "notes": ladder.notes,
        "chosen": None,
        "costs": [],
        "advice": [],
    }
    if chosen is not None and update is not None:
        answer["chosen"] = _candidate_as_json(chosen) | {"config": chosen.config.to_dict()}
        answer["costs"] = list(costs(chosen, update))
        answer["advice"] = list(map(str, find_advice(Setup.of(chosen.config, asked.world_size))))
    return answer


def _candidate_as_json(candidate: Candidate) -> dict[str, Any]:
    figures = candidate.run.largest[1] if candidate.run and candidate.run.ranks else None
    return {
        "changes": candidate.changes,
        "batch_rows": candidate.rows,
        "rejected": candidate.rejected,
        "needs": candidate.needs,
        "bytes": figures.bytes if figures else {},
        "update_simulated": figures is not None and figures.peak is not None,
        "bubble": candidate.run.bubble if candidate.run else 0.0,
    }
