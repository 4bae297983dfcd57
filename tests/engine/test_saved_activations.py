"""The keys `activation_checkpoint` and `activation_offload` in one process: less memory, and the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from halfmesh.parallel import offload
from tests.support import compiling
from tests.support.models import CLASSES, FEATURES, MODES, full_weights, make_engine, make_loader, train
from tests.support.saved_memory import bytes_left

FORMS = {
    "full": "full",
    "every": {"every": 2},
    "patterns": {"patterns": ["blocks.*.norm", "blocks.1", "head"]},
    "selective": "selective",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.drop(nn.functional.gelu(self.up(self.norm(x))))))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def weights_of(config, calls: int = 1):
    """What a few updates lead to. `calls`: forwards before each backward."""
    engine = make_engine(config, model=Deep())
    torch.manual_seed(1)
    for x, y in engine.dataloader:
        engine.zero_grad()
        losses = [engine.criterion(engine(x), y) for _ in range(calls)]
        engine.backward(sum(losses))
        engine.step()
    return full_weights(engine)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_trains_as_without(mode):
    config = MODES[mode] | {"gradient_accumulation": 2, "clip_grad_norm": 0.5}
    expected = weights_of(config)
    for form in FORMS.values():
        assert_same(weights_of(config | {"activation_checkpoint": form}), expected)
    assert_same(weights_of(config | {"activation_checkpoint": "full", "activation_offload": True}), expected)
    assert_same(weights_of(config | {"activation_offload": True}), expected)


def test_several_forwards_before_a_backward():
    expected = weights_of({}, calls=3)
    for form in FORMS.values():
        assert_same(weights_of({"activation_checkpoint": form}, calls=3), expected)


def bytes_of(keys) -> int:
    engine = make_engine(keys, model=Deep())
    x = torch.randn(512, FEATURES)
    engine(x)
    return bytes_left(lambda: engine(x))


@pytest.mark.parametrize("mode", [{}, MODES["naive_bf16"]])
def test_saved_bytes(mode):
    left = {name: bytes_of(mode | {"activation_checkpoint": form}) for name, form in FORMS.items()}
    left["off"] = bytes_of(mode)
    assert left["full"] < left["selective"] < left["off"]
    assert left["full"] < left["every"] < left["off"]
    assert left["full"] < left["patterns"] < left["off"]
    size = 2 if mode else 4
    inputs = 512 * (4 * 16 + 16) * size  # of four blocks and the head
    batch = 512 * FEATURES * 2 if mode else 0  # the engine's cast of it
    assert left["full"] == inputs + batch


def test_what_is_offloaded(monkeypatch):
    moved = []

    class Watched(offload._OnHost):
        def __init__(self, host, *more):
            super().__init__(host, *more)
            moved.append(host)

    monkeypatch.setattr(offload, "_OnHost", Watched)
    x = torch.randn(512, FEATURES)
    engine = make_engine({"activation_checkpoint": "full", "activation_offload": True}, model=Deep())
    engine(x)
    assert [tuple(tensor.shape) for tensor in moved] == [(512, 16)] * 4, "the inputs of the blocks"
    moved.clear()
    engine = make_engine({"activation_offload": True}, model=Deep())
    loss = engine.criterion(engine(x), torch.zeros(512, dtype=torch.int64))
    assert tuple(moved[0].shape) == (512, FEATURES)
    assert (512, 64) in {tuple(tensor.shape) for tensor in moved}
    assert all(tensor.shape[0] == 512 for tensor in moved), "no weights, and no statistics"
    assert not any(tuple(tensor.shape) == (512, CLASSES) for tensor in moved), "the criterion's stays"
    moved.clear()
    with torch.no_grad():
        engine(x)
    assert not moved
    engine.backward(loss)


def test_a_cpu_is_told(caplog):
    make_engine({"activation_offload": True})
    assert "activation_offload is of no use on a CPU" in caplog.text
    caplog.clear()
    make_engine({})
    assert "activation_offload" not in caplog.text


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"activation_checkpoint": "full"}, "4 blocks checkpointed (full)"),
        ({"activation_checkpoint": {"every": 4}}, "1 block checkpointed (every=4)"),
        ({"activation_checkpoint": {"patterns": ["blocks.*"]}}, "4 modules checkpointed (blocks.*)"),
        ({"activation_checkpoint": "full", "activation_offload": True}, "4 blocks checkpointed (full), offloaded"),
        ({"activation_offload": True}, "offloaded"),
    ],
)
def test_the_line_of_the_plan(keys, line, caplog):
    with caplog.at_level("INFO", "halfmesh"):
        make_engine(keys, model=Deep())
    assert f"\n  activations: {line}\n" in caplog.text


def test_the_model_is_given_back():
    model = Deep()
    names = list(model.state_dict()), [list(vars(module)) for module in model.modules()]
    engine = make_engine({"activation_checkpoint": "full"}, model=model)
    assert list(engine.model.state_dict()) == names[0]
    train(engine, max_batches=1)
    clone = copy.deepcopy(model)
    engine.close()
    assert [list(vars(module)) for module in model.modules()] == names[1]
    model.load_state_dict(clone.state_dict())
    x = torch.randn(4, FEATURES)
    assert torch.equal(model.eval()(x), clone.eval()(x))


def test_a_state_is_loaded_as_ever():
    config = {"activation_checkpoint": "full"}
    engine = make_engine(config, model=Deep())
    train(engine, max_batches=3)
    state = copy.deepcopy(engine.state_dict())
    other = make_engine({}, model=Deep())
    other.load_state_dict(state)
    assert_same(full_weights(other), full_weights(engine))


@pytest.mark.parametrize("form", ["full", "every", "patterns"])
def test_compiled(form):
    """What is computed again is compiled, too."""
    patterns = {"patterns": ["blocks.[01]", "head"]}
    keys = {"activation_checkpoint": patterns if form == "patterns" else FORMS[form]}
    compiled = {"compile": {"backend": compiling.NAME}}
    with compiling.watched() as watch:
        expected = weights_of(compiled | {"compile": {"backend": compiling.NAME, "scope": "blocks"}})
        without = watch.forwards
    with compiling.watched() as watch:
        found = weights_of(compiled | keys)
    assert_same(found, expected)
    again = {"full": 4, "every": 2, "patterns": 2}[form]
    assert without == 4 * len(make_loader())
    assert watch.forwards == (4 + again) * len(make_loader())


def test_offloaded_and_compiled():
    compiled = {"compile": {"backend": compiling.NAME}}
    with compiling.watched():
        expected = weights_of(compiled)
    with compiling.watched() as watch:
        assert_same(weights_of(compiled | {"activation_offload": True}), expected)
    assert watch.forwards == len(make_loader())


def test_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    ids = torch.arange(16).view(2, 8)
    grads = []
    for form in (False, "full", "selective"):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        engine = make_engine({"activation_checkpoint": form}, model=model, criterion=None)
        engine.backward(engine(ids, labels=ids, use_cache=False).loss)
        grads.append({name: param.grad for name, param in model.named_parameters()})
        assert_same(grads[-1], grads[0])
    with pytest.raises(ValueError, match=r"was called with past_key_values.*model.config.use_cache = False"):
        engine(ids, labels=ids)
