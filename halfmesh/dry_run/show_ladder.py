"""The output of `halfmesh plan`: as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..config.composition import Setup, find_advice
from ..errors import readable
from ..parallel.registries import AXES, DATA_STRATEGIES
from .rungs import ROOM, Candidate
from .writing import config_text, short

if TYPE_CHECKING:
    from .ladder import Ladder
    from .rungs import PlanRequest, Update

_MOST_NOTES = 8
_RECOMPUTED = {
    "selective": "backward recomputes all but matrix products, convolutions and attention",
    "full": "backward runs each block's forward a second time: about a third more work",
}


def lines(ladder: Ladder, asked: PlanRequest) -> Iterator[str]:
    """The rungs, the reason why each does not fit, and the cost of the one that fits."""
    if ladder.update is None:
        yield f"{asked.model} cannot be simulated with the config as it is:"
        yield from (f"  {problem}" for problem in ladder.rungs[0].refused.splitlines())
        return
    yield (
        f"{asked.world_size} rank(s), {ladder.update.rows} rows in an update; a rank may use {readable(asked.room)} of "
        f"{readable(asked.limit)}: a tenth is left to CUDA, NCCL and the allocator"
    )
    for number, rung in enumerate(ladder.rungs, 1):
        yield f"{number}. {' '.join(rung.changes) or 'the config as it is'}"
        yield f"     {_verdict(rung, asked)}"
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


def _verdict(rung: Candidate, asked: PlanRequest) -> str:
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
        yield f"batches: {now} row(s) go through the model at once instead of {before}: smaller matrix products"


def as_json(ladder: Ladder, asked: PlanRequest) -> dict[str, Any]:
    """The same with exact numbers."""
    chosen = ladder.chosen
    advice = find_advice(Setup.of(chosen.config, asked.world_size)) if chosen else ()
    return {
        "ok": chosen is not None,
        "world_size": asked.world_size,
        "limit": asked.limit,
        "room": ROOM,
        "rows_per_update": ladder.update.rows if ladder.update else None,
        "rungs": [_as_json(rung) for rung in ladder.rungs],
        "notes": ladder.notes,
        "chosen": None if chosen is None else _as_json(chosen) | {"config": short(chosen.config.to_dict())},
        "costs": list(costs(chosen, ladder.update)) if chosen and ladder.update else [],
        "advice": list(map(str, advice)),
    }


def _as_json(rung: Candidate) -> dict[str, Any]:
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
