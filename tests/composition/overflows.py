"""inf in one rank's gradient of one parameter: what every rank does about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import halfmesh
from tests.support.ranks import here
from tests.support.whole import close_whole

from .cells import Cell
from .training import digest, make_engine

KINDS = {
    "colwise": "blocks.0.mlp.up.weight",
    "rowwise": "blocks.1.mlp.down.weight",
    "fused qkv": "blocks.0.attention.qkv.weight",
    "tied embedding": "tokens.weight",
    "whole": "positions.weight",
    "norm": "blocks.1.norm1.weight",  # under sequence parallelism its gradient is summed over the tensor group
}
"""Parameters of the GPT, by how the ranks hold them."""


@dataclass(frozen=True)
class Overflow:
    """What one rank saw of one update.

    Attributes:
        alone: whether inf was in the gradients of this rank.
        changed: whether the update changed weights, masters or momentum.
    """

    kind: str
    rank: int
    alone: bool
    skipped: bool
    scale: float
    changed: bool


def overflow(rank: int, world_size: int, cell: Cell) -> tuple[list[Overflow], str]:
    """Each kind of parameter gets inf on each rank in turn, after the gradients are complete: no other rank can see it
    but through the verdict. An ordinary update follows each. Returns them, and the digest of the whole weights."""
    engine = make_engine(cell, rank)
    batch = next(iter(engine.dataloader))
    seen = []
    held = {shard.name: shard.param for shard in engine._update.master_weights.trained if shard.param.numel()}
    for kind, name in KINDS.items():
        for where in range(world_size):
            if not _any_rank(rank == where and name in held):  # not every rank holds all, or a part of all
                continue
            for poisons in (True, False):
                before = _state(engine)
                engine.zero_grad()
                engine.backward(engine.criterion(engine(batch[0]), batch[1]))
                if poisons and rank == where:
                    _poison(held[name])
                alone = not all(bool(grad.isfinite().all()) for grad in _gradients(engine))
                result = engine.step()
                changed = _state(engine) != before
                seen.append(Overflow(kind if poisons else "", where, alone, result.skipped, result.loss_scale, changed))
    return seen, digest(close_whole(engine))


def _any_rank(mine: bool) -> bool:
    """Whether it is true on any rank."""
    found = here(torch.tensor([mine], dtype=torch.int32))
    dist.all_reduce(found)
    return bool(found)


def _poison(param: nn.Parameter) -> None:
    """Put one inf into this rank's gradient of `param`."""
    grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
    grad.view(-1)[-1] = torch.inf
    param.grad = grad  # is added to what is kept in a wider format, if it is


def _gradients(engine: halfmesh.Engine) -> list[torch.Tensor]:
    """As this rank holds them."""
    return [shard.param.grad for shard in engine._update.master_weights.trained if shard.param.grad is not None]


def _state(engine: halfmesh.Engine) -> list[str]:
    """All that an update changes on this rank: the model's own weights, masters, momentum."""
    optimizer: dict[str, Any] = engine.optimizer.state_dict()["state"]
    # Momentum of zeros, which an update that is skipped may make, is as none.
    momentum = {
        str(number): buffer for number, state in optimizer.items() if (buffer := state["momentum_buffer"]).any()
    }
    held = dict(engine.model.named_parameters())
    return [digest(_local(state)) for state in (held, engine.state_dict()["model"], momentum)]


def _local(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: (t.to_local() if isinstance(t, DTensor) else t).detach() for n, t in state.items()}


def find_overflow_problems(results: list[tuple[list[Overflow], str]]) -> list[str]:
    """Everything that is wrong with what the ranks did."""
    problems = []
    for number, updates in enumerate(zip(*(seen for seen, _ in results), strict=True)):
        first = updates[0]
        what = f"update {number} ({first.kind or 'none'} poisoned on rank {first.rank})"
        where = [update.alone for update in updates]
        if where != [bool(first.kind) and rank == first.rank for rank in range(len(updates))]:
            problems.append(f"{what}: inf was in the gradients of ranks {where}")
        if len({(update.skipped, update.scale) for update in updates}) > 1:
            problems.append(f"{what}: the ranks differ: {[(update.skipped, update.scale) for update in updates]}")
        if {update.skipped for update in updates} != {bool(first.kind)}:
            problems.append(f"{what}: skipped on {[update.skipped for update in updates]}")
        if {update.changed for update in updates} != {not first.kind}:
            problems.append(f"{what}: changed something on {[update.changed for update in updates]}")
    scales = [update.scale for update in results[0][0]]
    if scales != [scales[0] if update.kind else scales[0] / 2 for update in results[0][0]]:
        problems.append(f"the scale has to fall by each overflow, and to grow by each other update: {scales}")
    if len({weights for _, weights in results}) > 1:
        problems.append("the ranks end with different weights")
    return problems
