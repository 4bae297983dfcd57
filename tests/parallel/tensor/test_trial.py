"""Plans of one's own that mix features between colwise and rowwise layers are rejected before the first update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import halfmesh
from halfmesh.utils.torch_private import call_hooks
from tests.support.models import MODES
from tests.support.nano_gpt import CONTEXT, GPT, PLAN, CausalSelfAttention
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import random, rejection, rng_state, scalar

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN, HEADS = 8, 16, 4
PAIR = {"*.up": "colwise", "*.down": "rowwise"}
FUSED = {"*.qkv": "fused_colwise(3)", "*.out": "rowwise"}


class Pair(nn.Module):
    """Two layers, and what stands between them; the first gives `times` times as many features as the second takes."""

    def __init__(self, between: Any = F.gelu, times: int = 1, zero: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, times * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.between = between
        if zero:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


def gated(h: torch.Tensor) -> torch.Tensor:
    value, gate = h.chunk(2, -1)
    return value * F.silu(gate)


def softmax(h: torch.Tensor) -> torch.Tensor:
    return h.softmax(-1)


class Softmaxed(Pair):
    def __init__(self) -> None:
        super().__init__(softmax)


class Named(Pair):
    """Calls its layers by a function that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = lambda x: self.down(softmax(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


class ScaledByInput(Pair):
    """The same forward, but each rank's gradient of the input is a part of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)) * x.sum(-1, keepdim=True))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)


class FixedHeads(Attention):
    def heads(self, x):
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


class FailsOnOne(Pair):
    """In the trial, as where the memory of one rank is used up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and dist.get_rank() == 0:
            raise RuntimeError("out of memory")
        return super().forward(x)


ALWAYS_DROPS = partial(Pair, partial(F.dropout, p=0.5))
"""Also in evaluation, as F.dropout does by default."""


class Residual(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.block = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


def row(*kinds: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(Residual, kinds), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))


def criterion(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float().flatten(0, -2), labels.flatten())


def start(model: Any, plan: dict[str, str], config: Any = None, **parallel: Any) -> halfmesh.Engine:
    tensor = {"size": 2, "plan": plan, "sequence_parallel": "1" in plan}
    config = {**(config or {}), "parallel": {"tensor": tensor, **parallel}}
    return halfmesh.initialize(
        model, lambda p: torch.optim.SGD(p, lr=0.1), criterion, config=config, device=rank_device()
    )


def learn(engine: Any, steps: int = 2) -> None:
    x, labels = random(4, 6, WIDTH, dtype=torch.float32), here(torch.arange(24).reshape(4, 6) % 3)
    for _ in range(steps):
        engine.backward(engine.criterion(engine(x), labels))
        engine.step()


WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "a softmax": (Softmaxed, PAIR),
    "a mean": (partial(Pair, lambda h: h - h.mean(-1, keepdim=True)), PAIR),
    "a gate": (partial(Pair, gated, 2), PAIR),
    "a fixed number of heads": (partial(Pair, lambda h: h.unflatten(-1, (HEADS, -1)).softmax(-1).flatten(-2)), PAIR),
    "an output of zero": (partial(Pair, softmax, zero=True), PAIR),
    "layers in a function": (Named, PAIR),
    "heads that are reshaped": (FixedHeads, FUSED),
    "a fused layer": (Attention, {"*.qkv": "colwise", "*.out": "rowwise"}),
}


def wrong_plans(rank: int, world_size: int) -> dict[str, str]:
    found = {name: rejection(lambda m=make, p=plan: learn(start(row(m, m), p))) for name, (make, plan) in WRONG.items()}
    return {**found, "backward": rejection(lambda: learn(start(row(ScaledByInput), PAIR)))}


@pytest.mark.promise(
    "tensor parallelism of chosen layers",
    "patterns with styles, checked before training",
    of="SageMaker",
    page="tensor-parallel.md",
)
def test_plans_that_mix_features_are_rejected_before_the_first_update():
    for found in run_ranks(wrong_plans, 2):
        backward = found.pop("backward")
        assert backward.startswith("InputError: the gradients of 0.weight, 0.bias"), backward
        assert "differ between the ranks of a tensor group" in backward
        for name, (make, plan) in WRONG.items():
            message, kind = found[name], type(make()).__name__
            begin = "InputError: 1 kind of block computed different outputs when sharded over tensor=2"
            assert message.startswith(begin), (name, message)
            assert f"1.block and 1 more ({kind}): its output differs by " in message
            assert f"The plan: {plan}" in message


BOTH = {**PAIR, **FUSED}
SEQUENCE = {**BOTH, "1": "sequence_begin", "*.block": "region", "3": "sequence_end"}
WAYS: dict[str, dict[str, Any]] = {
    "naive_fp16": MODES["naive_fp16"],
    "checkpointed": {**MODES["naive_bf16"], "activation_checkpoint": {"patterns": ["1", "2"]}},
    "compiled": {"compile": {"backend": "eager", "scope": "blocks"}},
    "accumulated": {"gradient_accumulation": 2},
}


def ways(rank: int, world_size: int) -> dict[str, tuple[str, ...]]:
    """What is said of a wrong plan and of a right one."""
    kinds, found = ((Attention, Softmaxed), (Attention, Pair)), {}
    for name, config in WAYS.items():
        found[name] = tuple(rejection(lambda k=k, c=config: learn(start(row(*k), BOTH, c))) for k in kinds)
    for name, plan in (("deferred", BOTH), ("sequence", SEQUENCE)):
        found[name] = tuple(rejection(lambda k=k, p=plan: learn(start(lambda: row(*k), p))) for k in kinds)
    return found


def test_in_every_precision_and_with_what_changes_the_forward():
    for found in run_ranks(ways, 2, timeout=240):
        assert len(found) == len(WAYS) + 2
        for way, (wrong, right) in found.items():
            assert "2.block (Softmaxed): its output differs by" in wrong, (way, wrong)
            assert "Attention" not in wrong, way
            assert right == "no error", (way, right)


LAYOUTS = {"pipeline": {"pipeline": {"size": 2, "microbatches": 2}}, "fsdp": {"data": "fsdp"}}


def layouts(rank: int, world_size: int) -> dict[str, tuple[str, ...]]:
    """A wrong block in one stage only, and with data ranks that shard weights."""
    kinds = (Softmaxed, Pair, Pair), (Pair, Pair, Pair)
    return {
        name: tuple(rejection(lambda k=k, p=parallel: learn(start(row(*k), PAIR, **p))) for k in kinds)
        for name, parallel in LAYOUTS.items()
    }


@pytest.mark.sends
def test_in_every_layout_on_all_ranks():
    for found in run_ranks(layouts, 4, timeout=240):
        for layout, (wrong, right) in found.items():
            assert "1.block (Softmaxed): its output differs by" in wrong, (layout, wrong)
            assert right == "no error", (layout, right)


@contextmanager
def told() -> Iterator[list[str]]:
    """The warnings about plans that are logged on this rank."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("halfmesh").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("halfmesh").removeHandler(handler)
        texts[:] = [text for text in texts if "parallel.tensor.plan" in text]


UNTRIED: dict[str, Callable[[], nn.Module]] = {
    "it draws random numbers also in evaluation": ALWAYS_DROPS,
    "computing it whole failed: RuntimeError('out of memory')": FailsOnOne,
}


def costs(rank: int, world_size: int) -> dict[str, Any]:
    """How often a block is computed, what becomes of random numbers, and what is told where nothing can be tried."""
    found: dict[str, Any] = {}
    calls: list[nn.Module] = []
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
    for name, model, plan in (("brought", layer, "auto"), ("own", Residual(Pair), PAIR)):
        block = getattr(model, "block", model)
        block.register_forward_hook(lambda module, *_: calls.append(module))
        engine = start(model, plan)
        hooks = len(call_hooks(block))
        for step in ("first", "second"):
            calls.clear()
            with told() as warnings:
                output = engine(random(4, 6, WIDTH, dtype=torch.float32))
                state = rng_state()
                engine.backward(scalar(output))
            found[f"{name}, {step}"] = len(calls), torch.equal(state, rng_state()), warnings
            engine.step()
        found[f"{name}, hooks"] = hooks - len(call_hooks(block))
        engine.close()
    for why, make in UNTRIED.items():
        with told() as warnings:
            engine = start(row(make, Pair), PAIR)
            output, state = engine(random(4, 6, WIDTH, dtype=torch.float32)), rng_state()
            engine.backward(scalar(output))
        found[why] = torch.equal(state, rng_state()), warnings
    return found


def test_what_it_costs_and_what_is_told():
    for rank, found in enumerate(run_ranks(costs, 2)):
        assert found["brought, first"] == found["brought, second"] == found["own, second"] == (1, True, [])
        assert found["own, first"] == (3, True, [])  # whole and sharded
        assert (found["brought, hooks"], found["own, hooks"]) == (0, 1)  # removed
        for why in UNTRIED:
            is_same, warnings = found[why]
            assert is_same
            assert len(warnings) == (rank == 0)
            assert all(f"the same when sharded: 1.block ({why}); compare a few" in text for text in warnings), warnings


def unchanged_gpt(rank: int, world_size: int) -> str:
    engine = start(GPT(CausalSelfAttention), PLAN)
    try:
        engine(here(torch.zeros(4, CONTEXT, dtype=torch.int64)))
    except RuntimeError as error:
        return "\n".join([str(error), *error.__notes__])
    return ""


def test_sizes_from_the_shape_of_an_input_are_explained():
    """With the one line that tells them otherwise, tests/parity trains it."""
    for message in run_ranks(unchanged_gpt, 2):
        assert "is invalid for input of size" in message
        assert "In 'transformer.h.0.attn' (CausalSelfAttention), with tensor=2." in message
        assert "parallel.tensor.plan: Between a 'colwise' and a 'rowwise' layer" in message
