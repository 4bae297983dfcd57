"""Optimizers of torchao with state in few bits, and what replaces masters: trained, saved, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh import InputError
from tests.support.ranks import run_ranks

ao = pytest.importorskip("torchao.optim")
WIDTH = 128  # smaller tensors are not quantised
KINDS = ["AdamW8bit", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("AdamW4bit", "AdamWFp8"))]


def make(kind: str, config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(dtype)
    optimizer = getattr(ao, kind)(model.parameters(), lr=1e-2, **options)
    return halfmesh.initialize(model, optimizer, nn.MSELoss(), None, config, device="cpu")


def train(engine: Any, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    return engine.full_state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [{}, {"bf16": {"mode": "naive"}}], ids=["none", "naive"])
def test_they_train_and_resume_bit_for_bit(kind, config, tmp_path):
    engine = make(kind, config)
    train(engine, range(2))
    engine.save(tmp_path)
    expected = train(engine, range(2, 4))
    state = next(iter(engine.optimizer.state.values()))
    assert type(state["exp_avg"]).__name__.startswith("OptimState")
    engine.close()
    again = make(kind, config)
    again.load(tmp_path)
    torch.testing.assert_close(train(again, range(2, 4)), expected, rtol=0, atol=0)
    again.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_gives_the_same_weights(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = getattr(ao, kind)(model.parameters(), lr=1e-2)
    for step in range(3):
        x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(train(make(kind, {}), range(3)), dict(model.state_dict()), rtol=0, atol=0)


def test_weights_in_bf16_need_masters():
    with pytest.raises(InputError, match=r"small updates are lost; .*bf16 = dict\(mode='naive'\)"):
        make("AdamW8bit", {}, torch.bfloat16, bf16_stochastic_round=True)


def refused(rank: int, world_size: int, parallel: dict[str, Any]) -> str:
    with pytest.raises(halfmesh.IncompatibleConfigError) as error:
        make("AdamW8bit", {"parallel": parallel})
    return str(error.value)


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [{"data": "zero1"}, {"data": "fsdp"}], ids=["zero1", "fsdp"])
def test_shards_would_cut_their_blocks(parallel):
    words = "it keeps 'exp_avg' as a OptimState8bit, in blocks that shards would cut elsewhere"
    assert all(words in said for said in run_ranks(refused, 2, parallel))
