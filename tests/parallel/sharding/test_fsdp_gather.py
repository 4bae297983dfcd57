"""fsdp gathers the weights of fp8's tensorwise products in float8. Gathering them wide is the oracle: bit by bit."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.amp.float8 import Float8Product
from halfmesh.utils.torch_private import ALL_GATHER
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

pytest.importorskip("torchao")
pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Blocks with two weights that fit float8, a layer that is tied to an embedding, one that is not used, a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Embedding(16, 32)
        self.tied = nn.Linear(32, 16, bias=False)
        self.tied.weight = self.begin.weight
        block = nn.LayerNorm(32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32, bias=False)
        self.blocks = nn.ModuleList(copy.deepcopy(nn.Sequential(*block)) for _ in range(2))
        self.unused, self.head = nn.Linear(32, 32), nn.Linear(16, 16)

    def forward(self, ids):
        x = self.begin(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.tied(x))


FLOAT8 = 2 * 2 * 32 * 64 + 32 * 32
"""Numbers in the weights that are gathered in float8."""


def make_engine(parallel, recipe="tensorwise", **more):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"fp8": {"mode": "torch", "recipe": recipe}, "parallel": parallel} | more
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device=rank_device())


def train(engine, part=0, parts=1):
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(4):
        ids, y = here(torch.randint(0, 16, (2, 16), generator=generator)[:, part::parts])
        by_call = step % 2 and engine.context.pp_size == 1  # which a stage rejects
        loss = engine.criterion(engine.call("forward", ids) if by_call else engine(ids), y)
        engine.backward(loss)
        if engine.step() is not None:
            engine.zero_grad()
        losses.append(loss.item())
        if step == 2:
            engine.model.to(engine.device)  # FSDP2 has other tensors then
    return losses


def train_both(rank, world_size, parallel, more):
    def run():
        engine = make_engine(parallel, **more)
        context, plan = engine.context, str(engine.plan)
        losses = train(engine, context.dp_rank, context.dp_size)
        return losses, close_whole(engine), "weights gathered in float8" in plan

    ours = run()
    with patch.object(Float8Product, "cast_before_gather", lambda self, model: {}):
        return ours, run()


FSDP = {"strategy": "fsdp"}
KEPT_BF16 = {"param_dtype": "bfloat16", "reshard_after_forward": False}
PIPE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ("blocks.1",), "schedule": "gpipe"}}
CASES = {
    "plain": (2, {"data": FSDP}, {}),
    "bf16, kept, accumulated": (2, {"data": FSDP | KEPT_BF16}, {"gradient_accumulation": 2}),
    "pipeline": (4, {"data": FSDP} | PIPE, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_gathered_wide(name):
    ranks, parallel, more = CASES[name]
    for ours, theirs in run_ranks(train_both, ranks, parallel, more, timeout=200):
        assert (ours[2], theirs[2]) == (True, False)
        assert ours[0] == theirs[0]
        assert all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())


REST = sum(param.numel() for param in Net().parameters()) - FLOAT8
BYTES = {
    "fp32": ({}, "tensorwise", FLOAT8 + 4 * REST, 5),
    "bf16": ({"param_dtype": "bfloat16"}, "tensorwise", FLOAT8 + 2 * REST, 5),
    "rowwise": ({}, "rowwise", 4 * (FLOAT8 + REST), 0),
}


def gather_once(rank, world_size):
    """Bytes that a forward gathers, and what the plan says of it."""
    found = {}
    for name, (options, recipe, _, _) in BYTES.items():
        engine = make_engine({"data": FSDP | options}, recipe=recipe)
        train(engine)
        with patch.object(dist, ALL_GATHER, wraps=getattr(dist, ALL_GATHER)) as gather, torch.no_grad():
            engine(here(torch.zeros(1, dtype=torch.long)))
        found[name] = sum(call.args[0].nbytes for call in gather.mock_calls), str(engine.plan)
        engine.close()
    return found


def test_bytes_that_are_gathered():
    """A byte for each number of a weight that only products in float8 use."""
    for found in run_ranks(gather_once, 2):
        for name, (_, _, expected, count) in BYTES.items():
            gathered, plan = found[name]
            assert gathered == expected, name
            assert (f"{count} weights gathered in float8" in plan) == (count > 0)


def write(rank, world_size, parallel):
    """By what torch does not count."""
    engine = make_engine(parallel)
    train(engine)
    with torch.no_grad():
        for param in engine.model.parameters():
            getattr(param, "_local_tensor", param).data.mul_(64)
        return engine.eval()(here(torch.arange(4)))


def test_scales_follow_what_is_written():
    (alone,) = run_ranks(write, 1, {})
    for output in run_ranks(write, 2, {"data": FSDP}):
        assert torch.equal(output, alone)
