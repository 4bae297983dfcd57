"""Casting a model: what is cast, what stays, and that ties survive."""

import warnings

import pytest
import torch
from torch import nn, optim

import halfmesh

HALF, FULL = torch.float16, torch.float32


class Odd(nn.Module):
    """A buffer under two names, a complex one, one that is not saved, a tied weight, BatchNorm used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        mask = torch.full((4,), 1 / 3)
        self.first.register_buffer("mask", mask)
        self.second.register_buffer("mask", mask)
        self.register_buffer("rotation", torch.polar(torch.ones(2), torch.tensor([0.5, 1.0])))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.norm = nn.BatchNorm1d(4)
        self.same_norm = self.norm

    def forward(self, x):
        x = self.same_norm(self.norm(self.first(x) * self.first.mask))
        return self.second(x) * self.second.mask * self.rotation.imag.sum().to(x.dtype)


@pytest.mark.parametrize("config", [{"mode": "naive"}, *({"mode": "apex", "opt_level": f"O{i}"} for i in (1, 2))])
def test_ties_and_complex_buffers_survive_training(config):
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = halfmesh.initialize(
            model, optim.SGD(model.parameters(), lr=0.1), None, None, {"fp16": config}, device="cpu"
        )
    casts = config["mode"] == "naive" or config["opt_level"] in ("O2", "O3")
    assert model.first.mask is model.second.mask
    assert model.first.weight is model.second.weight
    assert {model.first.mask.dtype, model.scratch.dtype, model.first.weight.dtype} == {HALF if casts else FULL}
    assert model.norm.weight.dtype == (HALF if casts and config.get("opt_level") != "O2" else FULL)
    assert model.norm.num_batches_tracked.dtype == torch.int64
    engine.backward(engine(torch.randn(8, 4)).square().mean())
    engine.step()
    dtypes = {name: value.dtype for name, value in before.items()}
    assert {name: value.dtype for name, value in engine.state_dict()["model"].items()} == dtypes
    engine.close()
    after = model.state_dict()
    assert {name: value.dtype for name, value in after.items()} == dtypes
    assert torch.equal(after["rotation"], before["rotation"])
    assert not torch.equal(after["first.weight"], before["first.weight"])
    assert model.first.mask is model.second.mask
