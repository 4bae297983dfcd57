"""Activations that are computed again or wait on the host: the same bits as without, and less memory."""

from __future__ import annotations

import contextlib
import copy
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from halfmesh.engine import recompute
from halfmesh.engine.offload import IN_FLIGHT, Copies, Offload, _is_cast_of_parameter
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.support.models import CLASSES, FEATURES, MLP, full_weights, make_engine
from tests.support.saved_memory import bytes_left

WIDTH = 16
FULL, SELECTIVE = {"activation_checkpoint": "full"}, {"activation_checkpoint": "selective"}
OFFLOAD = {"activation_offload": True}
NORMS = {
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),  # each call changes buffers
}


class Block(nn.Module):
    """Normalises, drops, and is given a tensor by name."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = NORMS[norm](), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, *, scale):
        return x + scale * self.drop(self.down(self.drop(nn.functional.gelu(self.up(self.norm(x))))))


class Deep(nn.Module):
    def __init__(self, norm="batch"):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(norm) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return self.head(x)


def trained(keys, norm, twice):
    """What a few updates lead to, and the random number after them. Each is of two forwards, after which a block goes
    to evaluation; `twice`: and of two backwards."""
    engine = make_engine(keys, model=Deep(norm))
    torch.manual_seed(1)
    for x, y in engine.dataloader:
        loss = engine.criterion(engine(x), y) + engine.criterion(engine(x), y)
        engine.model.blocks[0].eval()
        if twice:
            engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
    found = full_weights(engine) | {"next": torch.rand(3)}
    engine.close()
    return found


@pytest.mark.parametrize("norm", NORMS)
def test_buffers_change_and_modules_train_as_without(norm):
    for keys, twice in ((FULL, True), (SELECTIVE, False), (OFFLOAD, True)):
        torch.testing.assert_close(trained(keys, norm, twice), trained({}, norm, twice), rtol=0, atol=0)


def test_attention_is_kept_unless_it_drops():
    """What is not computed again draws no random numbers, and those after it would be others (on a GPU)."""
    attend, q = torch.ops.aten._scaled_dot_product_flash_attention.default, torch.zeros(1)
    save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert recompute._policy(None, attend, q, q, q) == save
    assert recompute._policy(None, attend, q, q, q, 0.1, True) == again
    places = recompute._ATTENTION.items()
    assert {operator._schema.arguments[place].name for operator, place in places} == {"dropout_p"}


@pytest.mark.promise("activation checkpointing and offloading")
def test_saved_bytes():
    found, x = [], torch.randn(512, FEATURES)
    for keys in ({}, FULL, SELECTIVE, {"activation_checkpoint": {"every": 2}}):
        engine = make_engine(keys, model=Deep())
        engine(x)
        found.append(bytes_left(partial(engine, x)))
    off, full, *others = found
    assert full < min(others)
    assert max(others) < off
    assert full == 512 * (4 * WIDTH + WIDTH) * 4, "the inputs of four blocks and the head"


class Exponential(nn.Linear):
    def forward(self, x):
        return super().forward(x).exp()


@pytest.mark.parametrize("rows", [1, 1000])
def test_a_change_in_place_after_the_forward(rows):
    """It is found out as without offloading, in what is too small to be moved, and in what was: on a GPU the copy to
    the host may not be over."""
    engine = make_engine(OFFLOAD, model=Exponential(2, 2))
    output = engine(torch.ones(rows, 2))
    loss = (output * 2).sum()
    with torch.no_grad():
        output.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


def test_the_model_stays_what_it_is():
    model, seen = Deep(), []
    handle = model.blocks[0].register_forward_hook(lambda *_: seen.append("forward"))
    attributes = [list(vars(module)) for module in model.modules()]
    engine = make_engine(FULL, model=model)
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x), y))
    assert seen == ["forward"]
    handle.remove()
    clone = copy.deepcopy(model)
    for param in clone.head.parameters():
        nn.init.zeros_(param)
    assert not clone(x).any()
    assert model(x).any(), "a copy computes by itself"
    engine.close()
    assert [list(vars(module)) for module in model.modules()] == attributes


BLOCKS = [f"blocks.{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (False, []),
        (True, BLOCKS),
        ({"every": 2}, BLOCKS[::2]),
        ({"patterns": ["*"]}, ["first", "head", *BLOCKS]),
        ({"patterns": ["blocks.0.up", "*.1.norm", "first"]}, ["first", "blocks.0.up", "blocks.1.norm"]),
        ({"patterns": ["blocks.1.up", "blocks.1"]}, BLOCKS[1:2]),
    ],
)
def test_which_modules_are_computed_again(form, expected):
    engine = make_engine({"activation_checkpoint": form}, model=Deep())
    found = [name for name, module in engine.model.named_modules() if "forward" in vars(module)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("form", "config", "message"),
    [
        ({"patterns": ["block.*.up"]}, {}, "matches no module that is called; did you mean 'blocks.*.up'?"),
        ({"patterns": ["blocks"]}, {}, "'blocks' matches no module that is called; did you mean 'blocks.*'?"),
        ("full", {"model": MLP()}, "MLP has no repeated blocks; name modules in `patterns`; it has again, drop, first"),
        ("selective", {"activation_offload": True}, "cannot be moved"),
        ("selective", {"compile": True}, "one by one; use 'full'"),
        ("full", {"compile": {"scope": "model"}}, "use 'blocks'"),
        ({"patterns": ["*.up"]}, {"compile": {"backend": "eager"}}, "would be inside compiled code"),
    ],
)
def test_models_in_which_nothing_is_found_and_keys_that_do_not_go_together(form, config, message):
    keys = {key: value for key, value in config.items() if key != "model"}
    with pytest.raises(IncompatibleConfigError) as raised:
        make_engine({"activation_checkpoint": form, **keys}, model=config.get("model", Deep()))
    assert message in str(raised.value)


def test_a_cache_of_transformers_is_rejected():
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    engine = make_engine(FULL, model=hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=8)))
    with pytest.raises(InputError, match=r"LlamaDecoderLayer was called with (cache|past_key_values).*use_cache=False"):
        engine(torch.zeros(1, 2, dtype=torch.long), use_cache=True)


# -- the order of copies of offloaded activations on a GPU, with copies that only note when they are asked for ---------

LAYERS = 12
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


class Noted:
    """What is done, in order: copies, waits for them, and the ends of tensors that were fetched. Their events are
    ("out", n) and ("back", n), where n counts the copies of one direction."""

    def __init__(self):
        self.done, self._numbers = [], {}
        self._hosts = []  # kept, so that no other tensor gets an id that was seen

    def to_host(self, tensor):
        host = tensor.detach().clone()
        event = "out", len(self._hosts)
        self._numbers[id(host)] = len(self._hosts)
        self._hosts.append(host)
        self.done.append(("copy", event))
        return host, event

    def to_device(self, host):
        event = "back", self._numbers[id(host)]
        self.done.append(("copy", event))
        tensor = host.clone()
        weakref.finalize(tensor, self.done.append, ("end", event))
        return tensor, event

    def wait(self, event):
        self.done.append(("wait", event))

    def copies(self, direction):
        return [number for what, (where, number) in self.done if (what, where) == ("copy", direction)]


def tanh_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(64, 64), nn.Tanh())))


def run(copies=None, twice=False):
    model = tanh_layers()
    with Offload(torch.device("cpu"), copies).everything(model):
        loss = model(X.clone().requires_grad_()).square().sum()
    for last in (False, True) if twice else (True,):
        model.zero_grad()
        loss.backward(retain_graph=not last)
    return [param.grad for param in model.parameters()]


def test_it_is_the_gradient_without_and_each_is_copied_once_for_each_backward():
    copies = Noted()
    assert all(map(torch.equal, run(copies), run()))
    back = copies.copies("back")
    assert back == sorted(back, reverse=True), "in the order in which backward needs them"
    assert len(set(back)) == len(back) == len(copies.copies("out")) > 2 * IN_FLIGHT, "each once"
    copies = Noted()
    assert all(map(torch.equal, run(copies, twice=True), run()))
    assert len(copies.copies("back")) == 2 * len(copies.copies("out")), "nothing stays on the device in between"


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def test_no_memory_of_a_graph_that_is_dropped_is_given_back_before_its_copy_has_ended():
    copies, model = Noted(), tanh_layers()
    with Offload(torch.device("cpu"), copies).everything(model):
        x = model[:LAYERS](X)
        loss = model[LAYERS:](FailsInBackward.apply(x)).square().sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss, x
    backs = copies.copies("back")
    for number in backs:
        order = [what for what, event in copies.done if event == ("back", number)]
        assert order == ["copy", "wait", "end"], number
    assert LAYERS // 2 < len(backs) < len(copies.copies("out"))


class FakeStream:
    """Notes what it does; the host's copies are those of the CPU."""

    def __init__(self, name, done):
        self.name, self.done, self.events = name, done, 0

    def wait_stream(self, other):
        self.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.done.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.events += 1
        return f"copy {self.events}"


def test_the_stream_that_owns_the_memory_waits(monkeypatch):
    done, empty_like = [], torch.empty_like
    current = [FakeStream("computation", done)]
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream("side", done))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **given: empty_like(*args, **given))
    copies = Copies(torch.device("cpu"))
    host, event = copies.to_host(X)
    assert torch.equal(host, X)
    copies.wait(event)
    assert done == ["side waits for computation", "computation waits for copy 1"]
    done.clear()
    tensor, event = copies.to_device(host)
    assert torch.equal(tensor, X)
    assert done == ["side waits for computation"]
    current[0] = FakeStream("other", done)  # a graph may be dropped where another stream is current
    copies.wait(event)
    assert sorted(done[1:]) == ["computation waits for copy 2", "other waits for copy 2"]


def test_casts_of_parameters_are_known():
    param, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2, requires_grad=True)
    assert all(map(_is_cast_of_parameter, (param.to(torch.bfloat16), param.to(torch.bfloat16).t(), param.half()[0])))
    assert not any(map(_is_cast_of_parameter, (param, param.t(), x.half(), (param * 2).half(), param.half() * 2)))
