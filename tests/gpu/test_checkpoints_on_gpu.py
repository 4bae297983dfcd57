"""engine.save and load on a GPU: dropout there goes on, too, and files hold no device. Skipped without CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.checkpoint_runs import train
from tests.support.models import MLP, MODES, adamw, make_loader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_engine(mode, device):
    loader = make_loader(48, 4, shuffle=True)
    config = {**MODES[mode], "gradient_accumulation": 2}
    return halfmesh.initialize(MLP(dropout=0.3), adamw, nn.CrossEntropyLoss(), loader, config, device=device)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_it_goes_on_bit_by_bit(mode, in_background, tmp_path):
    expected = train(make_engine(mode, "cuda"), 26, 6, tmp_path, in_background=in_background)[6:]
    other = make_engine(mode, "cuda")
    train(other, 2)
    other.load(tmp_path)
    assert train(other, 20) == expected


@pytest.mark.parametrize("mode", ["none", "torch_bf16", "naive_bf16"])
def test_from_a_gpu_to_the_cpu_and_back(mode, tmp_path):
    engine = make_engine(mode, "cuda")
    train(engine, 6, 6, tmp_path / "gpu")
    other = make_engine(mode, "cpu")
    other.load(tmp_path / "gpu")
    other.save(tmp_path / "cpu")
    again = make_engine(mode, "cuda")
    again.load(tmp_path / "cpu")
    expected = engine.model.state_dict()
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert train(again, 2)
