"""Optimizers of torchao with state in few bits, and what replaces masters: trained, saved, or rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh import InputError
from tests.support.models import step_on
from tests.support.ranks import run_ranks

ao = pytest.importorskip("torchao.optim")
WIDTH = 128  # smaller tensors are not quantised


@pytest.fixture(autouse=True)
def _eager():
    """torchao compiles its step, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make(config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(dtype)
    optimizer = ao.AdamW8bit(model.parameters(), lr=1e-2, **options)
    return halfmesh.initialize(model, optimizer, nn.MSELoss(), None, config, device="cpu")


def batch(step: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()


@pytest.mark.parametrize("config", [{}, {"bf16": {"mode": "naive"}}], ids=["none", "naive"])
def test_they_train_as_in_a_plain_loop_and_resume_bit_for_bit(config, tmp_path):
    engine, plain = make(config), make({})
    plain.close()
    for step in range(3):
        if step == 2:
            engine.save(tmp_path)
        step_on(engine, *batch(step))
        x, y = batch(step)
        plain.optimizer.zero_grad()
        nn.functional.mse_loss(plain.model(x), y).backward()
        plain.optimizer.step()
    expected = engine.full_state_dict()
    if not config:
        torch.testing.assert_close(expected, dict(plain.model.state_dict()), rtol=0, atol=0)
    state = next(iter(engine.optimizer.state.values()))
    assert type(state["exp_avg"]).__name__.startswith("OptimState")
    again = make(config)
    again.load(tmp_path)
    step_on(again, *batch(2))
    torch.testing.assert_close(again.full_state_dict(), expected, rtol=0, atol=0)


def test_weights_in_bf16_need_masters():
    with pytest.raises(InputError, match=r"small updates are lost; .*bf16 = dict\(mode='naive'\)"):
        make({}, torch.bfloat16, bf16_stochastic_round=True)


def rejected(rank: int, world_size: int) -> list[str]:
    found = []
    for data in ("zero1", "fsdp"):
        with pytest.raises(halfmesh.IncompatibleConfigError) as error:
            make({"parallel": {"data": data}})
        found.append(str(error.value))
    return found


@pytest.mark.distributed
def test_shards_would_cut_their_blocks():
    words = "it keeps 'exp_avg' as a OptimState8bit, in blocks that shards would cut elsewhere"
    assert all(words in said for found in run_ranks(rejected, 2) for said in found)
