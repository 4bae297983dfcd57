"""NAIVE: what stays in fp32, what is said of arguments that it rounds, and of dtypes that a forward mixes."""

import math
import warnings

import pytest
import torch
from torch import nn, optim

import halfmesh

HALF, FULL = torch.float16, torch.float32
TIMES = torch.tensor([998.3897, 513.3, 70000.0])


class Denoiser(nn.Module):
    """Computes with the sine of a timestep that comes as an argument, or in a dict; has frequencies of two kinds."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("inv_freq", 10000 ** -torch.linspace(0, 1, 8))
        self.fourier = nn.Parameter(torch.linspace(-30, 30, 8) / 3, requires_grad=False)

    def forward(self, x, t=None, batch=None):
        self.got = batch["t"] if t is None else t
        angles = self.got.float()[:, None] * (self.inv_freq + self.fourier / 1000)
        return self.a(x) * angles.sin().to(x.dtype)


def start(model, precision, **config):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return halfmesh.initialize(model, optimizer, nn.functional.mse_loss, None, precision | config, device="cpu")


def naive(key="bf16", **keys):
    return {key: {"mode": "naive", **keys}}


@pytest.mark.parametrize("pattern", ["t*", "batch.t", "batch"])
def test_arguments_that_are_kept(pattern):
    """Also by position, after a call of a module, which has other ones."""
    engine = start(model := Denoiser(), naive(keep_fp32=[pattern]))
    engine.call("a", x := torch.randn(3, 8))
    engine(x, *((TIMES,) if pattern == "t*" else (None, {"t": TIMES})))
    assert torch.equal(model.got, TIMES)
    engine.close()


@pytest.mark.parametrize(("mode", "key"), [("naive", "fp16"), ("naive", "bf16"), ("apex", "fp16")])
def test_frequencies_that_are_not_trained_and_what_a_model_wants_stay_in_fp32(mode, key):
    class Words(nn.Module):
        _keep_in_fp32_modules = frozenset({"wo"})  # transformers: in fp16
        _keep_in_fp32_modules_strict = ("gate.weight", "bias_*")

        def __init__(self):
            super().__init__()
            self.freqs = nn.Parameter(torch.rand(2), requires_grad=False)
            for name in ("inv_freq", "full_inv_freq", "bands", "periods", "scale", "bias_of"):
                self.register_buffer(name, torch.rand(2))
            self.rope = nn.ParameterDict({"freqs": torch.rand(2)})
            self.wo, self.two, self.gate = (nn.Linear(2, 2, bias=False) for _ in range(3))

    model = Words()
    start(model, {key: {"mode": mode} | ({"opt_level": "O2"} if mode == "apex" else {})})
    cast = {n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.dtype != FULL}
    assert cast == {"scale", "rope.freqs", "two.weight"} | ({"wo.weight"} if key == "bf16" else set())


def test_patterns_that_match_nothing_are_rejected():
    for pattern, text in (("inv_frek", "did you mean 'inv_freq'"), ("batsh.t", "its arguments: x, t")):
        with pytest.raises(halfmesh.InputError, match=f"keep_fp32: no buffer, parameter .* is named .*{text}"):
            start(Denoiser(), naive(keep_fp32=[pattern]))


@pytest.mark.parametrize(
    ("precision", "name", "value", "text"),
    [
        (naive("fp16"), "t", TIMES, "changes from 70000 to inf in float16"),
        (naive("bf16"), "batch.t", TIMES[:2].repeat(2)[:3], "argument 'batch.t' changes from 998.3897 to 1000 in bf"),
        ({"fp16": {"mode": "apex", "opt_level": "O2"}}, "t", TIMES, "changes from 70000 to inf"),
        (naive("fp16"), "t", torch.tensor([512.0, math.inf, 3.0]), None),
        ({"bf16": {"mode": "torch"}}, "t", TIMES, None),
    ],
)
def test_the_first_call_tells_of_arguments_that_change(caplog, precision, name, value, text):
    engine = start(Denoiser(), precision)
    for _ in range(2):
        with caplog.at_level("WARNING", "halfmesh"):
            engine(torch.randn(3, 8), **({"t": value} if name == "t" else {"batch": {"t": value}}))
    assert sum(record.levelname == "WARNING" for record in caplog.records) == (text is not None)
    assert text is None or (text in caplog.text and f"keep_fp32=[{name!r}]" in caplog.text)
    engine.close()


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(torch.zeros(len(x), 8) + x.sum())


def test_an_error_of_mixed_dtypes_names_the_layer_and_the_way_out():
    engine = start(nn.Sequential(nn.Identity(), Mixed()), naive())
    with pytest.raises(halfmesh.InputError, match=r"^in '1\.fc' \(Linear\): mat1 and mat2 must have .*mode='torch'"):
        engine(torch.randn(3, 8))
    engine.close()


class Odd(nn.Module):
    """A buffer under two names, a complex one, a tied weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.register_buffer("mask", torch.full((4,), 1 / 3))
        self.second.register_buffer("mask", self.first.mask)
        self.register_buffer("rotation", torch.polar(torch.ones(2), torch.tensor([0.5, 1.0])))

    def forward(self, x):
        x = self.first(x) * self.first.mask
        return self.second(x) * self.second.mask * self.rotation.imag.sum().to(x.dtype)


def test_ties_and_complex_buffers_survive_training():
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = start(model, naive("fp16"))
    assert model.first.mask is model.second.mask
    assert model.first.weight is model.second.weight
    assert model.first.mask.dtype == model.first.weight.dtype == HALF
    engine.backward(engine(torch.randn(8, 4)).square().mean())
    engine.step()
    saved = engine.state_dict()["model"]
    engine.close()
    after = model.state_dict()
    assert all(saved[name].dtype == after[name].dtype == value.dtype for name, value in before.items())
    assert torch.equal(after["rotation"], before["rotation"])
    assert not torch.equal(after["first.weight"], before["first.weight"])
    assert model.first.mask is model.second.mask
