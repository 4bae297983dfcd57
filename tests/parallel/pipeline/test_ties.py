"""Gradients of parameters that several stages use are summed over the ranks that hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.parallel.context import ParallelContext
from halfmesh.parallel.pipeline.ties import TiedGradients
from halfmesh.shard import ParamShard
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

HOLDERS = {"a": (0, 3), "b": (0, 1, 2, 3), "c": (0, 3), "d": (1, 2)}


def sums(rank: int, world_size: int) -> dict[str, Any]:
    """Parameters of three sets of ranks in two updates; rank 3 has no gradient of `c`, nobody one of `d`."""
    context = ParallelContext(4, 1, torch.device("cpu"))
    sets = sorted(set(HOLDERS.values()))
    groups = {ranks: context.subgroup("pp", ranks) for ranks in sets}
    params = {name: nn.Parameter(torch.zeros(3)) for name, ranks in HOLDERS.items() if rank in ranks}
    own = nn.Parameter(torch.zeros(2))
    shards = [ParamShard(name, p) for name, p in (*params.items(), ("own", own))]
    tied = TiedGradients({p: HOLDERS[name] for name, p in params.items()}, groups, shards)
    found: dict[str, Any] = {"covers": tied.covers(shards), "stale": tied.stale, "sums": []}
    for update in range(2):
        for param in (*params.values(), own):
            param.grad = None
        tied.open(True)
        for microbatch in range(2):
            own.sum().backward()
            for name, param in params.items():
                if name != "d" and (name, rank) != ("c", 3):
                    (param * (10.0**rank) * (microbatch + 1 + update)).sum().backward()
        tied.finish()
        grads = {name: None if p.grad is None else p.grad.tolist() for name, p in params.items()}
        found["sums"].append({**grads, "own": own.grad.tolist()})
    if rank:
        params["d" if rank in (1, 2) else "c"].requires_grad_(False)
    trained = [shard for shard in shards if shard.param.requires_grad]
    found["covers fewer"] = tied.covers(trained)
    tied.close()
    return found


def test_sums_over_the_holders():
    ranks = run_ranks(sums, 4)
    for update in range(2):
        factor = sum(microbatch + 1 + update for microbatch in range(2))
        expected = {"a": 1001.0 * factor, "b": 1111.0 * factor, "c": 1.0 * factor}
        for rank, found in enumerate(ranks):
            grads = found["sums"][update]
            assert grads.pop("own") == [2.0, 2.0]
            assert grads.keys() == {name for name, holders in HOLDERS.items() if rank in holders}
            for name, value in expected.items():
                assert grads.get(name, [value] * 3) == [value] * 3, (rank, name)
            assert grads.get("d") in (None, [0.0] * 3)
    for rank, found in enumerate(ranks):
        assert found["covers"]
        assert not found["stale"]
        assert found["covers fewer"] == (rank == 0)
