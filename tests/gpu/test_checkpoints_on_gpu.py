"""engine.save and load on a GPU: dropout there goes on, too, and files hold no device. Skipped without CUDA."""

from __future__ import annotations

import pytest
import torch
from models import MLP, MODES, adamw, make_loader
from torch import nn

import halfmesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_engine(mode, device):
    loader = make_loader(48, 4, shuffle=True)
    config = {**MODES[mode], "gradient_accumulation": 2}
    return halfmesh.initialize(MLP(dropout=0.3), adamw, nn.CrossEntropyLoss(), loader, config, device=device)


def losses_from(engine, batches, save_at=None, folder=None, **how):
    seen = []
    while True:
        for x, y in engine.dataloader:
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
            if len(seen) == save_at:
                engine.save(folder, **how)
            if len(seen) == batches:
                engine.wait_for_save()
                return seen


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_it_goes_on_bit_by_bit(mode, in_background, tmp_path):
    expected = losses_from(make_engine(mode, "cuda"), 26, 6, tmp_path, in_background=in_background)[6:]
    other = make_engine(mode, "cuda")
    losses_from(other, 2)
    other.load(tmp_path)
    assert losses_from(other, 20) == expected


@pytest.mark.parametrize("mode", ["none", "torch_bf16", "naive_bf16"])
def test_from_a_gpu_to_the_cpu_and_back(mode, tmp_path):
    engine = make_engine(mode, "cuda")
    losses_from(engine, 6, 6, tmp_path / "gpu")
    other = make_engine(mode, "cpu")
    other.load(tmp_path / "gpu")
    other.save(tmp_path / "cpu")
    again = make_engine(mode, "cuda")
    again.load(tmp_path / "cpu")
    expected = engine.model.state_dict()
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert losses_from(again, 2)
