"""Casting a model: what is cast, what stays, and that ties survive."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh.amp.cast import Precision, cast_model, tensors_to_cast
from halfmesh.amp.recipe import Recipe

HALF, FULL = torch.float16, torch.float32
RECIPE = Recipe(HALF, HALF)
KEEPS = Recipe(HALF, HALF, keep_batchnorm_fp32=True)


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


@pytest.mark.parametrize("recipe", [RECIPE, KEEPS])
def test_ties_and_complex_buffers_survive(recipe):
    model = Odd()
    rotation = model.rotation.clone()
    names = {name for name, _ in tensors_to_cast(model, recipe)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast_model(model, recipe)
    assert model.first.mask is model.second.mask
    assert model.first.weight is model.second.weight
    assert model.first.mask.dtype == model.scratch.dtype == model.first.weight.dtype == HALF
    assert torch.equal(model.rotation, rotation)
    assert model.norm.weight.dtype == (FULL if recipe is KEEPS else HALF)
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert {"first.weight", "first.mask", "scratch", "second.bias"} <= names
    assert not names & {"rotation", "norm.num_batches_tracked"}
    assert ("norm.running_mean" in names) == (recipe is RECIPE)


@pytest.mark.parametrize("config", [{"mode": "naive"}, *({"mode": "apex", "opt_level": f"O{i}"} for i in range(4))])
def test_a_model_with_them_trains_and_comes_back(config):
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = halfmesh.initialize(
        model, optim.SGD(model.parameters(), lr=0.1), None, None, {"fp16": config}, device="cpu"
    )
    engine.backward(engine(torch.randn(8, 4)).square().mean())
    engine.step()
    state = engine.state_dict()["model"]
    assert list(state) == list(before)
    assert {name: value.dtype for name, value in state.items()} == {n: v.dtype for n, v in before.items()}
    engine.close()
    after = model.state_dict()
    assert {name: value.dtype for name, value in after.items()} == {n: v.dtype for n, v in before.items()}
    assert torch.equal(after["rotation"], before["rotation"])
    assert not torch.equal(after["first.weight"], before["first.weight"])
    assert model.first.mask is model.second.mask


def autocast_state():
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    flags = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
    return *flags, torch.get_autocast_dtype("cpu"), nesting


AROUND = {
    "nothing": nullcontext,
    "the same": lambda: torch.autocast("cpu", torch.bfloat16),
    "another dtype": lambda: torch.autocast("cpu", torch.float16),
    "off": lambda: torch.autocast("cpu", enabled=False),
    "no cache": lambda: torch.autocast("cpu", cache_enabled=False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("around", AROUND)
def test_calls_run_in_what_autocast_sets(around, dtype):
    """All of it, and nothing of it stays."""
    precision = Precision(Recipe(dtype, autocast=True), torch.device("cpu"))

    def fail():
        raise LookupError

    with AROUND[around]():
        before = autocast_state()
        with precision.autocast():
            within = autocast_state()
        for _ in range(2):
            assert precision.within(autocast_state) == within
            assert autocast_state() == before
            with pytest.raises(LookupError):
                precision.within(fail)
            assert autocast_state() == before


def test_cast_weights_are_kept_for_as_long_as_autocast_keeps_them():
    precision = Precision(Recipe(torch.bfloat16, autocast=True), torch.device("cpu"))
    linear, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)

    def change(value):
        linear.weight.data.fill_(value)  # not counted as a change
        return precision.within(linear, x).tolist()

    assert change(1.0) == [[2.0, 2.0]]
    assert change(2.0) == [[4.0, 4.0]], "no scope around: nothing is kept"
    with torch.autocast("cpu", torch.bfloat16):
        assert change(3.0) == [[6.0, 6.0]]
        assert change(4.0) == [[6.0, 6.0]], "the scope around keeps them"
    assert change(5.0) == [[10.0, 10.0]]
