"""Values of a deferred model: made later, from what its build did to tensors without memory."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import timm
import torch
import transformers
from torch import nn

import halfmesh
from halfmesh import InputError

sgd = partial(torch.optim.SGD, lr=0.1)


def made(build, seed=3):
    """What `build` gives, modules or tensors, as a part of a model that is built later."""
    torch.manual_seed(seed)
    return initialize(lambda: Holder(build)).held


def initialize(model):
    with halfmesh.initialize(model, sgd, config={}, device="cpu") as engine:
        return engine.model


class Holder(nn.Module):
    def __init__(self, build):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.held = build()


def llama():
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **small)
    )


def odd():
    return nn.ModuleList(
        [
            nn.LSTM(4, 4),
            nn.utils.parametrizations.weight_norm(nn.Linear(30, 30)),
            nn.utils.parametrizations.orthogonal(nn.Linear(30, 30)),  # compares values while it is built
            nn.utils.parametrizations.spectral_norm(nn.Linear(30, 30)),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2),  # copies layers
            nn.Linear(40, 40),
            nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        ]
    )


BUILDS = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", depth=1),  # its init draws until all numbers fit
    "llama": llama,
    "odd": odd,
}


@pytest.mark.parametrize("name", BUILDS)
def test_values_look_like_those_of_an_ordinary_build_and_the_seed_decides(name):
    built, again, other = (made(BUILDS[name], seed) for seed in (3, 3, 4))
    values, same, others = built.state_dict(), again.state_dict(), other.state_dict()
    assert all(torch.equal(values[key], same[key]) for key in values)
    assert any(not torch.equal(values[key], others[key]) for key in values)
    ordinary = BUILDS[name]()
    for key, expected in ordinary.state_dict().items():
        value = values[key]
        assert (value.shape, value.dtype, value.stride()) == (expected.shape, expected.dtype, expected.stride()), key
        assert value.untyped_storage().nbytes() <= max(expected.untyped_storage().nbytes(), 8), key
        if expected.numel() > 500:
            assert value.std().item() == pytest.approx(expected.std().item(), rel=0.15), key
            assert value.mean().item() == pytest.approx(expected.mean().item(), abs=0.1), key
    trained = [(n, p.requires_grad) for n, p in built.named_parameters()]
    assert trained == [(n, p.requires_grad) for n, p in ordinary.named_parameters()]


def test_each_tensor_has_numbers_of_its_own_from_the_seed_or_a_generator():
    def build(seed, of_generator):
        torch.manual_seed(seed)
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        nn.init.normal_(layers[0].bias, generator=torch.Generator().manual_seed(of_generator))
        return layers

    a, b, c = (made(partial(build, *given)) for given in ((1, 2), (5, 2), (1, 6)))
    assert not torch.equal(a[0].weight, a[1].weight)
    assert [torch.equal(a[0].weight, other[0].weight) for other in (b, c)] == [False, True]
    assert [torch.equal(a[0].bias, other[0].bias) for other in (b, c)] == [True, False]


def test_weights_that_are_loaded_while_or_after_the_model_is_built():
    torch.manual_seed(0)
    saved = nn.Linear(4, 4).state_dict()

    def build():
        linear = nn.Linear(4, 4)
        linear.load_state_dict(saved)
        return linear

    assert torch.equal(made(build).weight, saved["weight"])
    with halfmesh.deferred_init():
        built = nn.Linear(4, 4)
    built.load_state_dict(saved)
    with torch.no_grad():
        built.bias.fill_(2.0)
    average = initialize(copy.deepcopy(built))
    for model in (initialize(built), average):
        assert torch.equal(model.weight, saved["weight"])
        assert torch.equal(model.bias, torch.full((4,), 2.0))


def test_what_values_come_from_may_not_change_before_they_are_made():
    """Small ones are copied."""
    large, small = torch.ones(600, 600), torch.ones(600)
    with halfmesh.deferred_init():
        nn.Linear(2**20, 2**20)  # has no memory, which would be 4 TiB
        first, second = nn.Linear(600, 1), nn.Linear(600, 600)
        first.weight.data.copy_(small)
        second.weight.data.copy_(large)
    large.add_(1), small.add_(1)
    assert initialize(first).weight.eq(1).all()
    with pytest.raises(
        InputError, match=r"shape \(600, 600\).*was changed after the model was built; do not change it"
    ):
        initialize(second)


def test_questions_are_answered_and_what_is_written_later_does_not_count():
    asked = []

    def build():
        weight = nn.Linear(4, 4).weight
        asked.append(weight.sum().item() + 16)
        weight.data.add_(1.0)
        asked.append(weight.sum().item())
        asked.append(weight[weight > 1].numel())
        old = torch.zeros(3).add_(torch.arange(3))
        double = old * 2
        old.fill_(9.0)
        return [weight, double, old]

    weight, double, old = made(build)
    assert asked == [pytest.approx(weight.sum().item(), abs=1e-5)] * 2 + [int((weight > 1).sum())]
    assert (double.tolist(), old.tolist()) == ([0.0, 2.0, 4.0], [9.0, 9.0, 9.0])


def test_the_default_dtype_of_the_build_counts_and_autocast_later_does_not():
    def build():
        torch.set_default_dtype(torch.float64)
        line = torch.linspace(0, 1, 36).view(6, 6)
        found = [torch.full((3,), 0.02), torch.eye(2), line @ line.T, torch.arange(4) / 4]
        torch.set_default_dtype(torch.float32)
        return found

    with halfmesh.deferred_init():
        holder = Holder(build)
    with torch.autocast("cpu", torch.bfloat16):
        found = initialize(holder).held
    for value, expected in zip(found, build(), strict=True):
        assert value.dtype == torch.float64
        assert torch.equal(value, expected)


def replaced(path):
    linear = nn.Linear(4, 4)
    linear.bias.data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return linear


def loaded(path):
    linear = nn.Linear(4, 4)
    linear.load_state_dict(torch.load(path, weights_only=True))
    return linear


@pytest.mark.parametrize("build", [replaced, loaded])
def test_memory_from_elsewhere_cannot_be_written_down(build, tmp_path):
    torch.save(nn.Linear(4, 4).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(InputError, match=r"got its memory in a way that deferred_init cannot record"):
        made(partial(build, tmp_path / "weights.pt"))
