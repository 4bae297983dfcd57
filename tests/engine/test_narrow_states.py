"""Optimizers of torchao with state in few bits: trained, saved, or rejected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.models import step_on
from tests.support.ranks import run_ranks

ao = pytest.importorskip("torchao.optim")
WIDTH = 128  # smaller tensors are not quantised


@pytest.fixture(autouse=True)
def _eager():
    """torchao compiles its step, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = ao.AdamW8bit(model.parameters(), lr=1e-2)
    return halfmesh.initialize(model, optimizer, nn.MSELoss(), None, config, device="cpu")


@pytest.mark.parametrize("config", [{}, {"bf16": {"mode": "naive"}}], ids=["none", "naive"])
def test_they_train_and_resume_bit_for_bit(config, tmp_path):
    engine, again = make(config), make(config)
    x, y = torch.randn(2, 8, WIDTH).unbind()
    step_on(engine, x, y)
    engine.save(tmp_path)
    again.load(tmp_path)
    for each in (engine, again):
        step_on(each, x, y)
    assert type(next(iter(engine.optimizer.state.values()))["exp_avg"]).__name__.startswith("OptimState")
    torch.testing.assert_close(again.full_state_dict(), engine.full_state_dict(), rtol=0, atol=0)


def rejected(rank, world_size):
    for data in ("zero1", "fsdp"):
        words = "it keeps 'exp_avg' as a OptimState8bit, in blocks that shards would cut elsewhere"
        with pytest.raises(halfmesh.IncompatibleConfigError, match=words):
            make({"parallel": {"data": data}})


@pytest.mark.distributed
def test_shards_would_cut_their_blocks():
    run_ranks(rejected, 2)
