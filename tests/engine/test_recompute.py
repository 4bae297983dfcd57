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
from tests.support.models import CLASSES, FEATURES, MODES, full_weights, make_engine, make_loader
from tests.support.saved_memory import bytes_left

WIDTH = 16
FULL, SELECTIVE = {"activation_checkpoint": "full"}, {"activation_checkpoint": "selective"}
EVERY = {"activation_checkpoint": {"every": 2}}
PATTERNS = {"activation_checkpoint": {"patterns": ["blocks.*.norm", "blocks.1", "head"]}}
OFFLOAD = {"activation_offload": True}


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
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "batch, frozen": lambda: nn.BatchNorm1d(WIDTH).eval(),
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


def trained(keys: Any, norm: str = "batch", odd: bool = False, twice: bool = False) -> dict[str, torch.Tensor]:
    """What a few updates lead to, and the random number after them. `odd`: each is of two forwards, after which a block
    goes to evaluation; `twice`: and of two backwards."""
    engine = make_engine(keys, model=Deep(norm))
    torch.manual_seed(1)
    for x, y in engine.dataloader:
        loss = engine.criterion(engine(x), y)
        if odd:
            loss = loss + engine.criterion(engine(x), y)
            engine.model.blocks[0].eval()
        if twice:
            engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
    found = full_weights(engine) | {"next": torch.rand(3)}
    engine.close()
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "torch_fp16", "naive_bf16", "apex_o1"])
def test_each_mode_trains_as_without(mode):
    config = MODES[mode] | {"gradient_accumulation": 2, "clip_grad_norm": 0.5}
    expected = trained(config)
    for keys in (FULL, SELECTIVE, EVERY, PATTERNS, OFFLOAD, FULL | OFFLOAD):
        assert_same(trained(config | keys), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_buffers_change_and_modules_train_as_without(norm):
    expected = trained({}, norm, odd=True)
    for keys in (FULL, SELECTIVE, OFFLOAD):
        assert_same(trained(keys, norm, odd=True), expected)


def test_backward_twice_through_one_graph():
    expected = trained({}, twice=True)
    for keys in (FULL, OFFLOAD):
        assert_same(trained(keys, twice=True), expected)


@pytest.mark.slow
def test_compiled():
    """What is computed again is compiled, too."""
    compiled = {"compile": {"backend": compiling.NAME}}
    blocks = {"compile": {"backend": compiling.NAME, "scope": "blocks"}}
    for keys, plain, calls in ((FULL, blocks, (4, 8)), (EVERY, blocks, (4, 6)), (OFFLOAD, compiled, (1, 1))):
        with compiling.watched() as without:
            expected = trained(plain)
            assert without.forwards == calls[0] * len(make_loader())
        with compiling.watched() as watch:
            assert_same(trained(compiled | keys), expected)
            assert watch.forwards == calls[1] * len(make_loader())


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


def bytes_of(keys: Any) -> int:
    engine = make_engine(keys, model=Deep())
    x = torch.randn(512, FEATURES)
    engine(x)
    return bytes_left(lambda: engine(x))


@pytest.mark.promise("activation checkpointing and offloading")
@pytest.mark.parametrize("mode", [{}, MODES["naive_bf16"]], ids=str)
def test_saved_bytes(mode):
    off, full, *others = (bytes_of(mode | keys) for keys in ({}, FULL, SELECTIVE, EVERY, PATTERNS))
    assert full < min(others)
    assert max(others) < off
    size = 2 if mode else 4
    inputs = 512 * (4 * WIDTH + WIDTH) * size  # of four blocks and the head
    batch = 512 * FEATURES * 2 if mode else 0  # the engine's cast of it
    assert full == inputs + batch


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
        engine.criterion(engine(x), torch.zeros(512, dtype=torch.int64))
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
    output = engine(torch.ones(rows, 2))
    loss = (output * 2).sum()
    with torch.no_grad():
        output.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


# -- the module, and what is rejected ---------------------------------------------------------------------------------


def test_the_model_stays_what_it_is():
    model, seen = Deep(), []
    names, attributes = list(model.state_dict()), [list(vars(module)) for module in model.modules()]
    block = model.blocks[0]
    handles = [block.register_forward_hook(lambda *_: seen.append("forward"))]
    handles.append(block.register_full_backward_hook(lambda *_: seen.append("backward")))
    engine = make_engine(FULL, model=model)
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x), y))
    assert seen == ["forward", "backward"]
    assert list(model.state_dict()) == names
    clone = copy.deepcopy(model)
    for param in clone.head.parameters():
        nn.init.zeros_(param)
    assert not clone(x).any()
    assert model(x).any(), "a copy computes by itself"
    for handle in handles:
        handle.remove()
    engine.close()
    assert [list(vars(module)) for module in model.modules()] == attributes


def test_a_cache_of_transformers_is_rejected():
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=8))
    engine = make_engine(FULL, model=model)
    with pytest.raises(InputError, match=r"LlamaDecoderLayer was called with (cache|past_key_values).*use_cache=False"):
        engine(torch.zeros(1, 2, dtype=torch.long), use_cache=True)
