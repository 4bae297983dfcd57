"""Values that are made later, from what was done to tensors without memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import timm
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfmesh import InputError
from halfmesh.deferred.recording import Recording, recording_of
from halfmesh.deferred.tape import Tape
from tests.support.versions import TORCH


def record(build, seed=3):
    torch.manual_seed(seed)
    recording = Recording()
    with recording:
        built = build()
    recording.exit_build()
    return recording, built


def values(recording, module):
    """In the reverse order, which must not matter."""
    named = list(module.state_dict(keep_vars=True).items())
    return {n: recording.value(t) if recording_of(t) else t.detach() for n, t in reversed(named)}


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
            nn.Linear(40, 40).half(),
            nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        ]
    )


BUILDS = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", depth=1),  # its init draws until all numbers fit
    "resnet": lambda: timm.create_model("resnet10t"),
    "llama": llama,
    "odd": odd,
}


@pytest.mark.parametrize("name", BUILDS)
def test_values_look_like_those_of_an_ordinary_build(name):
    recording, built = record(BUILDS[name])
    made = values(recording, built)
    torch.manual_seed(3)
    ordinary = BUILDS[name]()
    for key, expected in ordinary.state_dict().items():
        value = made[key]
        assert (value.shape, value.dtype, value.stride()) == (expected.shape, expected.dtype, expected.stride()), key
        if expected.numel() > 500:
            assert value.float().std().item() == pytest.approx(expected.float().std().item(), rel=0.15), key
            assert value.float().mean().item() == pytest.approx(expected.float().mean().item(), abs=0.1), key
    trained = [(n, p.requires_grad) for n, p in built.named_parameters()]
    assert trained == [(n, p.requires_grad) for n, p in ordinary.named_parameters()]


@pytest.mark.parametrize("name", BUILDS)
def test_the_seed_decides(name):
    first, again, other = (record(BUILDS[name], seed) for seed in (3, 3, 4))
    assert first[0].digest() == again[0].digest()
    assert first[0].seeds == again[0].seeds != other[0].seeds
    mine, theirs = values(*first), values(*again)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_nothing_has_memory_while_the_model_is_built():
    _, built = record(lambda: nn.Linear(2**20, 2**20))  # 4 TiB
    assert built.weight.shape == (2**20, 2**20)
    assert str(built.weight.device) == "cpu"


def test_a_value_has_no_more_memory_than_it_needs_to():
    recording, built = record(lambda: nn.Linear(64, 64))
    value = recording.value(built.weight)
    assert value.untyped_storage().nbytes() == 64 * 64 * 4
    assert recording.value(built.weight).data_ptr() != value.data_ptr()


def test_seeds_within_the_build_and_generators_count():
    def build(seed, of_generator):
        torch.manual_seed(seed)
        linear = nn.Linear(4, 4)
        nn.init.normal_(linear.bias, generator=torch.Generator().manual_seed(of_generator))
        return linear

    (one, a), (two, b), (three, c) = (record(lambda given=given: build(*given)) for given in ((1, 2), (5, 2), (1, 6)))
    assert not torch.equal(one.value(a.weight), two.value(b.weight))
    assert torch.equal(one.value(a.bias), two.value(b.bias))
    assert torch.equal(one.value(a.weight), three.value(c.weight))
    assert not torch.equal(one.value(a.bias), three.value(c.bias))


def test_each_tensor_has_numbers_of_its_own():
    recording, built = record(lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))
    assert not torch.equal(recording.value(built[0].weight), recording.value(built[1].weight))


def test_weights_that_are_loaded_while_or_after_the_model_is_built():
    torch.manual_seed(0)
    saved = nn.Linear(4, 4).state_dict()

    def build():
        linear = nn.Linear(4, 4)
        linear.load_state_dict(saved)
        return linear

    recording, built = record(build)
    assert torch.equal(recording.value(built.weight), saved["weight"])
    recording, built = record(lambda: nn.Linear(4, 4))
    built.load_state_dict(saved)  # outside
    with torch.no_grad():
        built.bias.fill_(2.0)
    assert torch.equal(recording.value(built.weight), saved["weight"])
    assert torch.equal(recording.value(built.bias), torch.full((4,), 2.0))
    average = copy.deepcopy(built)
    assert torch.equal(recording.value(average.weight), saved["weight"])


def test_what_values_come_from_may_not_change_before_they_are_made():
    """Small ones are copied."""
    large, small = torch.ones(600, 600), torch.ones(600)

    def build():
        linear = nn.Linear(600, 600)
        linear.weight.data.copy_(large)
        linear.bias.data.copy_(small)
        return linear

    recording, built = record(build)
    large.data.add_(1), small.data.add_(1)
    assert recording.value(built.bias).eq(1).all()
    with pytest.raises(InputError, match=r"shape \(600, 600\).*was changed after the model had taken it; leave it"):
        recording.value(built.weight)


def test_values_from_outside_are_in_the_digest():
    def build(value):
        linear = nn.Linear(4, 4)
        linear.bias.data.copy_(torch.full((4,), value))
        return linear

    constant = torch.tensor([1.0, 2.0, 3.0, 4.0])
    digests = [record(lambda v=v: nn.Linear(4, 4).bias.data.copy_(v))[0].digest() for v in (constant, constant + 1)]
    assert digests[0] != digests[1]
    assert record(lambda: build(1.0))[0].digest() != record(lambda: build(2.0))[0].digest()


def test_questions_are_answered_and_their_answers_count():
    asked = []

    def build():
        linear = nn.Linear(4, 4)
        asked.append(linear.weight.sum().item())
        asked.append(bool((linear.weight > 0).any()))
        if asked[0] > 1e9:
            linear.bias.data.zero_()
        linear.weight.data.add_(1.0)
        asked.append(linear.weight.sum().item())
        asked.append(linear.weight[linear.weight > 1].numel())
        return linear

    recording, built = record(build)
    weight = recording.value(built.weight)
    assert asked[0] == pytest.approx(weight.sum().item() - 16, abs=1e-5)
    assert asked[1] is True
    assert asked[2] == pytest.approx(weight.sum().item(), abs=1e-5)
    assert asked[3] == int((weight > 1).sum())


def test_what_was_asked_before_a_later_write_is_not_taken_for_later():
    """b is made of an old a, of which only the new one was asked for."""
    asked = []

    def build():
        a = torch.zeros(3).add_(torch.arange(3))
        b = a * 2
        a.fill_(9.0)
        asked.append(a.sum().item())
        asked.append(b.sum().item())
        return a, b

    recording, (a, b) = record(build)
    assert asked == [27.0, 6.0]
    assert recording.value(b).tolist() == [0.0, 2.0, 4.0]
    assert recording.value(a).tolist() == [9.0, 9.0, 9.0]


@pytest.fixture
def done(monkeypatch):
    """What is done again for questions (the mode itself is below all that could watch it), and with what held."""
    seen, do = [], Tape._do

    def watched(self, op, storages):
        do(self, op, storages)
        seen.append((str(op.function), sum(storage.nbytes() for storage in storages.values())))

    monkeypatch.setattr(Tape, "_do", watched)
    return seen


def test_questions_about_one_tensor_after_the_other_hold_one_at_a_time(done):
    def build():
        layers = [nn.Linear(64, 64, bias=False) for _ in range(20)]
        for layer in layers:
            while not (layer.weight.data.mul_(0.5).abs() < 0.01).all():
                pass
        return nn.ModuleList(layers)

    recording, built = record(build)
    assert max(held for _, held in done) < 4 * 64 * 64 * 4
    assert sum("uniform_" in name for name, _ in done) == 20
    assert all(recording.value(layer.weight).abs().max() < 0.01 for layer in built)


def test_a_question_goes_on_from_the_one_before(done):
    def build():
        made = torch.empty(100).normal_()
        for _ in range(10):
            made.mul_(0.5).sum().item()
        return made

    record(build)
    assert [sum(word in name for name, _ in done) for word in ("normal_", "mul_", "sum")] == [1, 10, 10]


def test_writing_into_a_tensor_with_values_is_done_at_once():
    outside = torch.zeros(3)

    def build():
        made = torch.full((3,), 2.0)
        outside.copy_(made)
        return made

    record(build)
    assert outside.tolist() == [2.0, 2.0, 2.0]


def test_memory_that_nobody_wrote_to_is_zero_on_all_ranks():
    recording, made = record(
        lambda: (torch.empty(1000), torch.zeros(4).new_empty(1000), torch.empty_like(torch.ones(9)))
    )
    assert all(recording.value(tensor).eq(0).all() for tensor in made)


def test_the_generator_of_the_user_is_left_as_the_build_left_it():
    recording, built = record(lambda: nn.Linear(4, 4))
    before = torch.get_rng_state()
    recording.value(built.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_of_other_devices_are_left_alone(monkeypatch):
    """`torch.manual_seed` would seed all of them, which nothing puts back."""
    recording, built = record(lambda: nn.Linear(4, 4))
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    recording.value(built.weight)
    assert seeded == []


def test_only_what_a_value_is_made_of_is_made():
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    recording, built = record(lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(50)))
    with Watch():
        recording.value(built[49].bias)
    assert sum("uniform_" in call for call in calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_the_build_counts(dtype):
    def build():
        torch.set_default_dtype(dtype)
        made = torch.full((3,), 0.02), torch.linspace(0, 1, 4), torch.eye(2), torch.randn(4), torch.arange(4) / 4
        torch.set_default_dtype(torch.float32)
        return made

    recording, (full, line, eye, drawn, quarters) = record(build)
    assert {t.dtype for t in (full, line, eye, drawn, quarters)} == {dtype}
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(recording.value(full), torch.full((3,), 0.02, dtype=dtype))
        assert torch.equal(recording.value(line), torch.linspace(0, 1, 4, dtype=dtype))
        assert torch.equal(recording.value(eye), torch.eye(2, dtype=dtype))
        assert recording.value(quarters).tolist() == [0, 0.25, 0.5, 0.75]
        assert 0 < recording.value(drawn).std() < 5
        assert not recording.value(full).is_inference()


def test_autocast_where_values_are_made_changes_nothing():
    def build():
        weight = torch.linspace(0, 1, 36).view(6, 6).clone()
        return weight.copy_(weight @ weight.T)

    recording, made = record(build)
    expected = build()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(recording.value(made), expected)


def test_one_buffer_that_is_filled_again_and_again():
    def build():
        layers, buffer = [nn.Linear(4, 3) for _ in range(2)], np.zeros((3, 4), "float32")
        for index, layer in enumerate(layers):
            buffer[:] = index + 1
            layer.weight.data.copy_(torch.from_numpy(buffer))
        return layers

    recording, layers = record(build)
    assert [recording.value(layer.weight).mean().item() for layer in layers] == [1, 2]


def test_tensors_of_another_recording():
    first, one = record(lambda: nn.Linear(4, 4), seed=1)
    second, two = record(lambda: nn.Linear(4, 4), seed=2)
    with torch.no_grad():
        two.weight.copy_(one.weight)
    assert torch.equal(second.value(two.weight), first.value(one.weight))
    assert second.digest() != Recording().digest()


def conjugated():
    linear = nn.Linear(4, 4)
    linear.weight.data.copy_(torch.polar(torch.rand(4), torch.arange(4.0)).conj().imag)
    return linear


def quantised():
    linear = nn.Linear(4, 4)
    linear.bias.data.copy_(torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8).dequantize())
    return linear


def sparse():
    linear = nn.Linear(4, 4)
    linear.register_buffer("adjacency", torch.eye(4).to_sparse())
    return linear


def replaced():
    linear = nn.Linear(4, 4)
    linear.bias.data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return linear


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (conjugated, r"shape \(4,\) is a conjugated or negated view, which cannot be made later; build"),
        pytest.param(
            quantised,
            r"made \(4,\) of torch\.qint8 otherwise than was foreseen",
            marks=pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 raises an error of its own"),
        ),
        (sparse, r"shape \(4, 4\) is sparse_coo, which cannot be made later"),
        (replaced, r"shape \(4,\) got its memory in a way that cannot be written down .*load before, or after"),
    ],
)
def test_what_cannot_be_written_down(build, words):
    with pytest.raises(InputError, match=words):
        values(*record(build))


def test_a_checkpoint_that_is_loaded_within(tmp_path):
    torch.save(nn.Linear(4, 4).state_dict(), tmp_path / "weights.pt")

    def build():
        linear = nn.Linear(4, 4)
        linear.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        return linear

    with pytest.raises(InputError, match=r"got its memory in a way that cannot be written down \(torch\.load or"):
        record(build)
