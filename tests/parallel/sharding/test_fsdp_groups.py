"""fsdp where data ranks are those of several axes, and experts are sharded over fewer of them than other weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

import halfmesh
from halfmesh.verify.models import mixture
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_engine(parallel: dict[str, Any], **config: Any) -> tuple[halfmesh.Engine, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model, (ids, target) = mixture()[:2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    config = {"parallel": parallel, "track_grad_norm": True, **config}
    engine = halfmesh.initialize(model, optimizer, loss_of, config=config, device=rank_device())
    own = slice(engine.context.dp_rank, None, engine.context.dp_size)
    return engine, here(ids)[own], here(target)[own]


def train(rank: int, world_size: int, parallel: dict[str, Any], config: dict[str, Any]) -> Any:
    engine, ids, target = make_engine(parallel, **config)
    norms = []
    for _ in range(2 * engine.config.gradient_accumulation):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(ids), target))
        result = engine.step()
        norms += [] if result is None or result.grad_norm is None else [result.grad_norm]
    return norms, close_whole(engine)


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "context": (4, {"context": 2}, {}),
    "context alone": (2, {"context": 2}, {}),
    "expert, summed": (2, {"expert": 2}, {"loss_reduction": "sum"}),
    "two groups of experts, summed": (4, {"expert": 2}, {"loss_reduction": "sum"}),
    "experts, accumulated": (4, {"expert": 2}, {"gradient_accumulation": 2}),
    "expert and context": (4, {"expert": 2, "context": 2}, {}),
    "copies of context ranks": (4, {"context": 2, "data": {"strategy": "fsdp", "hybrid": 2}}, {}),
}


@pytest.mark.promise("gradients of a weight are reduced once")
@pytest.mark.parametrize("name", CASES)
def test_trains_as_replicated_weights_do(name: str) -> None:
    ranks, parallel, config = CASES[name]
    ours = run_ranks(train, ranks, {"data": "fsdp", **parallel}, config, timeout=120)
    theirs = run_ranks(train, ranks, {**parallel, "data": "replicate"}, config, timeout=120)
    for (norms, weights), (expected, replicated) in zip(ours, theirs, strict=True):
        assert len(norms) == len(expected) > 0
        torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(weights, replicated, rtol=0, atol=2e-6)


def groups(rank: int, world_size: int, parallel: dict[str, Any]) -> tuple[set[str], dict[str, int]]:
    """The units, and over how many ranks each parameter is sharded."""
    engine, *_ = make_engine(parallel)
    units = {name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)}
    return units, {name: param.device_mesh.size() for name, param in engine.model.named_parameters()}


def test_units_and_the_ranks_that_share_them() -> None:
    """Experts are units of their own, over the ranks that hold the same ones."""
    (units, ranks), *_ = run_ranks(groups, 4, {"data": "fsdp", "expert": 2})
    layers = {name for name in units if name.endswith(".experts")}
    assert layers
    assert units - layers == {"", *(name.removesuffix(".mlp.experts") for name in layers)}
    assert {name: size for name, size in ranks.items() if size != 4} == {
        name: 2 for name in ranks if ".experts." in name
    }
    _, ranks = run_ranks(groups, 4, {"data": "fsdp", "context": 2})[0]
    assert set(ranks.values()) == {4}
