"""Activations that are computed again or wait on the host: the same bits as without, and less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from halfmesh.engine import recompute
from halfmesh.errors import InputError
from tests.support import compiling
from tests.support.models import BF16_TORCH, CLASSES, FEATURES, MODES, full_weights, make_engine, make_loader
from tests.support.saved_memory import bytes_left

WIDTH = 16
FULL, SELECTIVE = {"activation_checkpoint": "full"}, {"activation_checkpoint": "selective"}
EVERY = {"activation_checkpoint": {"every": 2}}
PATTERNS = {"activation_checkpoint": {"patterns": ["blocks.*.norm", "blocks.1", "head"]}}
OFFLOAD = {"activation_offload": True}
KEYS = {"full": FULL, "selective": SELECTIVE, "every": EVERY, "patterns": PATTERNS}
KEYS |= {"offload": OFFLOAD, "full, offload": FULL | OFFLOAD}


class Counting(nn.Module):
    """Multiplies by a buffer that each call changes, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.factor.mul_(1.125)
        else:
            self.factor = self.factor * 1.125
        return x * self.factor.clone()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "batch, cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "batch, frozen": lambda: nn.BatchNorm1d(WIDTH),
    "instance": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
    ),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "buffer in place": lambda: Counting(in_place=True),
    "buffer replaced": lambda: Counting(in_place=False),
}


class Block(nn.Module):
    """Normalises, drops, and is given a tensor by name."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = NORMS[norm](), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(0.3)
        if norm == "batch, frozen":
            self.norm.eval()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return x + scale * self.drop(self.down(self.drop(nn.functional.gelu(self.up(self.norm(x))))))


class Deep(nn.Module):
    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(norm) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return self.head(x)


def trained(keys, model: nn.Module | None = None, calls: int = 1, between: Any = None, twice: bool = False):
    """What a few updates lead to, and the random number after them.

    Args:
        calls: forwards before each backward.
        between: is called with the model between the first forward and backward.
        twice: goes backward through each graph two times.
    """
    engine = make_engine(keys, model=model or Deep())
    torch.manual_seed(1)
    for x, y in engine.dataloader:
        loss = sum(engine.criterion(engine(x), y) for _ in range(calls))
        if between is not None:
            between(engine.model)
            between = None
        if twice:
            engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
    found = full_weights(engine) | {"next": torch.rand(3)}
    engine.close()
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("activation checkpointing and offloading, with the rest")
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_trains_as_without(mode):
    config = MODES[mode] | {"gradient_accumulation": 2, "clip_grad_norm": 0.5}
    expected = trained(config)
    for keys in KEYS.values():
        assert_same(trained(config | keys), expected)


@pytest.mark.parametrize("keys", [FULL, SELECTIVE], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_buffers_change_as_without(norm, keys):
    assert_same(trained(keys, Deep(norm), calls=2), trained({}, Deep(norm), calls=2))


@pytest.mark.parametrize("keys", [FULL, SELECTIVE, OFFLOAD], ids=str)
def test_modules_train_in_backward_as_they_did_in_the_forward(keys):
    options = {"between": lambda model: model.blocks[0].eval()}
    assert_same(trained(keys, **options), trained({}, **options))


def test_backward_twice_through_one_graph():
    expected = trained({}, twice=True)
    for keys in (FULL, OFFLOAD):
        assert_same(trained(keys, twice=True), expected)


class OwnScope(nn.Module):
    """A block of the model leaves autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        with torch.autocast("cpu", enabled=False):
            return self.blocks[1](x.float())


def test_casts_are_those_of_the_forward():
    for keys in (FULL, SELECTIVE):
        assert_same(trained(BF16_TORCH | keys, OwnScope()), trained(BF16_TORCH, OwnScope()))


def test_attention_is_kept_unless_it_drops():
    """What is not computed again draws no random numbers, and those after it would be others (on a GPU)."""
    attend, q = torch.ops.aten._scaled_dot_product_flash_attention.default, torch.zeros(1)
    save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert recompute._policy(None, attend, q, q, q) == save
    assert recompute._policy(None, attend, q, q, q, 0.1, True) == again
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert recompute._policy(None, efficient, q, q, q, None, True) == save
    assert recompute._policy(None, efficient, q, q, q, None, True, 0.1) == again


# -- memory ----------------------------------------------------------------------------------------------------------


def bytes_of(keys) -> int:
    engine = make_engine(keys, model=Deep())
    x = torch.randn(512, FEATURES)
    engine(x)
    return bytes_left(lambda: engine(x))


@pytest.mark.promise("activation checkpointing and offloading, with the rest")
@pytest.mark.parametrize("mode", [{}, MODES["naive_bf16"]], ids=str)
def test_saved_bytes(mode):
    left = {name: bytes_of(mode | KEYS[name]) for name in ("full", "selective", "every", "patterns")}
    left["off"] = bytes_of(mode)
    assert left["full"] < left["selective"] < left["off"]
    assert left["full"] < left["every"] < left["off"]
    assert left["full"] < left["patterns"] < left["off"]
    size = 2 if mode else 4
    inputs = 512 * (4 * WIDTH + WIDTH) * size  # of four blocks and the head
    batch = 512 * FEATURES * 2 if mode else 0  # the engine's cast of it
    assert left["full"] == inputs + batch


class Copies(TorchDispatchMode):
    """The shapes of tensors that are cloned: on the CPU that is how they are moved to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.aten.clone.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_what_is_offloaded():
    x = torch.randn(512, FEATURES)
    engine = make_engine(FULL | OFFLOAD, model=Deep())
    engine(x)  # finds out which buffers change
    with Copies() as copies:
        engine(x)
    assert copies.shapes == [(512, WIDTH)] * 4, "the inputs of the blocks"
    engine = make_engine(OFFLOAD, model=Deep())
    with Copies() as copies:
        output = engine(x)
        engine.criterion(output, torch.zeros(512, dtype=torch.int64))
    assert {(512, FEATURES), (512, 64), (512, WIDTH)} <= set(copies.shapes)
    assert all(shape[0] == 512 for shape in copies.shapes), "no weights, and no statistics"
    assert (512, CLASSES) not in copies.shapes, "the criterion's stays"
    with torch.no_grad(), Copies() as copies:
        engine(x)
    assert not copies.shapes


class Exponential(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).exp()


@pytest.mark.parametrize("rows", [1, 1000])
def test_a_change_in_place_after_the_forward(rows):
    """It is found out as without offloading, in what is too small to be moved, and in what was: on a GPU the copy to
    the host may not be over."""
    engine = make_engine(OFFLOAD, model=Exponential(2, 2))
    x = torch.ones(rows, 2)
    output = engine(x)
    loss = (output * 2).sum()
    with torch.no_grad():
        output.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


# -- the module, and what is refused ---------------------------------------------------------------------------------


def test_the_model_stays_what_it_is():
    model, seen = Deep(), []
    names, attributes = list(model.state_dict()), [list(vars(module)) for module in model.modules()]
    handles = [
        model.blocks[0].register_forward_hook(lambda *_: seen.append("forward")),
        model.blocks[0].register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    engine = make_engine(FULL, model=model)
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert seen == ["forward", "backward"]
    assert list(model.state_dict()) == names
    clone = copy.deepcopy(model)
    nn.init.zeros_(clone.head.weight)
    nn.init.zeros_(clone.head.bias)
    assert not clone(x).any()
    assert model(x).any(), "a copy computes by itself"
    for handle in handles:
        handle.remove()
    engine.close()
    assert [list(vars(module)) for module in model.modules()] == attributes


def test_a_cache_of_transformers_is_refused():
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=8))
    engine = make_engine(FULL, model=model)
    with pytest.raises(InputError, match=r"LlamaDecoderLayer was called with (cache|past_key_values).*use_cache=False"):
        engine(torch.zeros(1, 2, dtype=torch.long), use_cache=True)


# -- with others -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", {"every": 2}, {"patterns": ["blocks.[01]", "head"]}], ids=str)
def test_compiled(form):
    """What is computed again is compiled, too."""
    compiled = {"compile": {"backend": compiling.NAME}}
    with compiling.watched() as watch:
        expected = trained({"compile": {"backend": compiling.NAME, "scope": "blocks"}})
        without = watch.forwards
    with compiling.watched() as watch:
        found = trained(compiled | {"activation_checkpoint": form})
    assert_same(found, expected)
    assert without == 4 * len(make_loader())
    assert watch.forwards == (4 + (4 if form == "full" else 2)) * len(make_loader())


@pytest.mark.slow
def test_offloaded_and_compiled():
    compiled = {"compile": {"backend": compiling.NAME}}
    with compiling.watched():
        expected = trained(compiled)
    with compiling.watched() as watch:
        assert_same(trained(compiled | OFFLOAD), expected)
    assert watch.forwards == len(make_loader())
