"""Activations that are computed again or wait on the host: the same bits as without, and less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from halfmesh.engine import recompute
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.support.models import CLASSES, FEATURES, MLP, full_weights, make_engine
from tests.support.saved_memory import bytes_left

WIDTH = 16
FULL, SELECTIVE = {"activation_checkpoint": "full"}, {"activation_checkpoint": "selective"}
EVERY = {"activation_checkpoint": {"every": 2}}
OFFLOAD = {"activation_offload": True}


class Counting(nn.Module):
    """Multiplies by a buffer that each call changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        self.factor.mul_(1.125)
        return x * self.factor.clone()


NORMS = {
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "buffer": Counting,
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


def bytes_of(keys):
    engine = make_engine(keys, model=Deep())
    x = torch.randn(512, FEATURES)
    engine(x)
    return bytes_left(lambda: engine(x))


@pytest.mark.promise("activation checkpointing and offloading")
def test_saved_bytes():
    off, full, *others = map(bytes_of, ({}, FULL, SELECTIVE, EVERY))
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
        (
            {"patterns": ["block.*.up"]},
            {},
            "'block.*.up' matches no module that is called; did you mean 'blocks.*.up'?",
        ),
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
