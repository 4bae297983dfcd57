"""An overflow on one rank alone makes every rank skip, in whichever parameter it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .cells import Cell, Pipe
from .parity import digest, make_engine, run_cell

pytestmark = pytest.mark.distributed

KINDS = {
    "colwise": "blocks.0.mlp.up.weight",
    "rowwise": "blocks.1.mlp.down.weight",
    "fused qkv": "blocks.0.attention.qkv.weight",
    "tied embedding": "tokens.weight",
    "whole": "positions.weight",
    "norm": "blocks.1.norm1.weight",  # under sequence parallelism its gradient is summed over the tensor group
}
"""Parameters of the GPT, by how the ranks hold them."""
# The scale grows by each update that is not skipped, so that as many overflows as one likes can follow.
CELLS = [
    Cell("torch_fp16", "gpt", tensor=2, data=2),
    Cell("naive_fp16", "gpt", tensor=2, data=2, sequence_parallel=True),
    Cell("naive_fp16", "gpt", data=2, pipeline=Pipe(2, "1f1b", 2)),
    Cell("torch_fp16", "gpt", tensor=2, data=2, strategy="fsdp"),
]


def overflow(rank: int, world_size: int, cell: Cell) -> list[tuple[str, bool, float, bool]]:
    """Each kind of parameter gets inf on the first and the last rank that holds it, after the gradients are complete:
    no other rank can see it but through the verdict. An ordinary update follows each. Returns for each update the kind
    that got inf, whether it was skipped, its scale, and whether anything changed on this rank."""
    engine = make_engine(cell, rank)
    x, y = next(iter(engine.dataloader))
    seen = []
    held = {shard.name: shard.param for shard in engine._update.master_weights.trained if shard.param.numel()}
    for kind, name in KINDS.items():
        holds = [False] * world_size
        dist.all_gather_object(holds, name in held)
        holders = [other for other in range(world_size) if holds[other]]
        for where in (holders[0], None, holders[-1], None):
            before = state(engine)
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            if where == rank:
                param = held[name]
                grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
                grad.view(-1)[-1] = torch.inf
                param.grad = grad  # is added to what is kept in a wider format, if it is
            result = engine.step()
            seen.append(("" if where is None else kind, result.skipped, result.loss_scale, state(engine) != before))
    engine.close()
    return seen


def state(engine: Any) -> list[str]:
    """All that an update changes on this rank: the model's own weights, masters, momentum."""
    optimizer = engine.optimizer.state_dict()["state"]
    # Momentum of zeros, which an update that is skipped may make, is as none.
    momentum = {str(number): buffer for number, one in optimizer.items() if (buffer := one["momentum_buffer"]).any()}
    parts = dict(engine.model.named_parameters()), engine.state_dict()["model"], momentum
    return [digest({n: (t.to_local() if isinstance(t, DTensor) else t).detach() for n, t in p.items()}) for p in parts]


@pytest.mark.promise(
    "loss scaling under tensor and pipeline", "all ranks skip together", of="SageMaker", page="composition.md"
)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_rank_skips(cell):
    first, *others = run_cell(cell, overflow, cell)
    assert all(other == first for other in others)
    scale = first[0][2]  # which falls by each overflow, and grows by each other update
    assert first == [(kind, bool(kind), scale if kind else scale / 2, not kind) for kind, *_ in first]
    assert {kind for kind, *_ in first} == {*KINDS, ""}
