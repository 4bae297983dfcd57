"""fsdp with one data rank is fsdp: it gathers block by block, from host memory under `cpu_offload`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import halfmesh
from tests.support.ranks import here, rank_device
from tests.support.whole import close_whole

X = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(4, (4, 8), generator=torch.Generator().manual_seed(2))


def make() -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*block, nn.Linear(8, 4))


def by_hand() -> list[torch.Tensor]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in zip(X, Y, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def engine_of(model: nn.Module, parallel: Any) -> halfmesh.Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"parallel": parallel, "clip_grad_norm": 0.5}
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), None, config, device=rank_device())


def train(engine: halfmesh.Engine, first: int, last: int) -> None:
    for x, y in zip(here(X[first:last]), here(Y[first:last]), strict=True):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()


@pytest.mark.parametrize("offload", [False, True])
def test_one_process_trains_saves_and_resumes_as_by_hand(offload: bool, tmp_path: Path):
    parallel = {"data": {"strategy": "fsdp", "cpu_offload": offload}}
    engine = engine_of(make(), parallel)
    assert all(isinstance(param, DTensor) for param in engine.model.parameters())
    where = " in host memory" if offload else ""
    assert f"weights sharded{where} over 1 data rank (fsdp)" in str(engine.plan)
    train(engine, 0, 2)
    engine.save(tmp_path / "saved")
    engine.close()
    assert not dist.is_initialized()
    model = make()
    engine = engine_of(model, parallel)
    engine.load(tmp_path / "saved")
    train(engine, 2, 4)
    torch.testing.assert_close(list(close_whole(engine).values()), by_hand())
