"""Plans of one's own that mix features between colwise and rowwise layers are rejected before the first update."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import random, rejection, rng_state, scalar

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN, HEADS = 8, 16, 4
PAIR = {"*.up": "colwise", "*.down": "rowwise"}
FUSED = {"*.qkv": "fused_colwise(3)", "*.out": "rowwise"}


class Pair(nn.Module):
    """Two layers, and what stands between them."""

    def __init__(self, between: Any = F.gelu, zero: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), between
        if zero:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class Softmaxed(Pair):
    def __init__(self, zero: bool = False) -> None:
        super().__init__(lambda h: h.softmax(-1), zero)


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


class Residual(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.block = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


def row(*kinds: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(Residual, kinds), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))


def start(model: Any, plan: dict[str, str], config: Any = None, **parallel: Any) -> halfmesh.Engine:
    tensor = {"size": 2, "plan": plan, "sequence_parallel": "1" in plan}
    return halfmesh.initialize(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda output, labels: F.cross_entropy(output.float().flatten(0, -2), labels.flatten()),
        config={**(config or {}), "parallel": {"tensor": tensor, **parallel}},
        device=rank_device(),
    )


def learn(engine: Any) -> None:
    x, labels = random(4, 6, WIDTH, dtype=torch.float32), here(torch.arange(24).reshape(4, 6) % 3)
    for _ in range(2):
        engine.backward(engine.criterion(engine(x), labels))
        engine.step()


WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "a softmax": (Softmaxed, PAIR),
    "a mean": (partial(Pair, lambda h: h - h.mean(-1, keepdim=True)), PAIR),
    "an output of zero": (partial(Softmaxed, zero=True), PAIR),
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
            assert message.startswith("InputError: in a trial before any update, some blocks compute something")
            assert f"1.block and 1 more ({kind}): its output differs by " in message
            assert f"The plan: {plan}" in message


BOTH = {**PAIR, **FUSED}
SEQUENCE = {**BOTH, "1": "sequence_begin", "*.block": "region", "3": "sequence_end"}
CHECKPOINTED = {**MODES["naive_fp16"], "activation_checkpoint": {"patterns": ["1", "2"]}}


def ways(rank: int, world_size: int) -> dict[str, tuple[str, ...]]:
    """What is said of a wrong plan and of a right one: recomputed in half precision, and of a deferred model under
    sequence parallelism."""
    kinds = (Attention, Softmaxed), (Attention, Pair)
    return {
        "naive_fp16": tuple(rejection(lambda k=k: learn(start(row(*k), BOTH, CHECKPOINTED))) for k in kinds),
        "sequence": tuple(rejection(lambda k=k: learn(start(lambda: row(*k), SEQUENCE))) for k in kinds),
    }


def test_with_what_changes_the_forward():
    for found in run_ranks(ways, 2, timeout=240):
        for way, (wrong, right) in found.items():
            assert "2.block (Softmaxed): its output differs by" in wrong, (way, wrong)
            assert "Attention" not in wrong, way
            assert right == "no error", (way, right)


def layouts(rank: int, world_size: int) -> list[str]:
    """What is said of a wrong block: in one stage only, and where data ranks shard weights."""
    axes = {"pipeline": {"size": 2, "microbatches": 2}}, {"data": "fsdp"}
    return [rejection(lambda a=a: learn(start(row(Softmaxed, Pair, Pair), PAIR, **a))) for a in axes]


@pytest.mark.sends
def test_in_every_layout_on_all_ranks():
    for found in run_ranks(layouts, 4, timeout=240):
        assert all("1.block (Softmaxed): its output differs by" in wrong for wrong in found), found


def costs(rank: int, world_size: int) -> list[Any]:
    """How often a block is computed, what becomes of random numbers, and that nobody waits where one rank fails."""
    found: list[Any] = []
    calls: list[nn.Module] = []
    model = Residual(Pair)
    model.block.register_forward_hook(lambda module, *_: calls.append(module))
    engine = start(model, PAIR)
    hooks = len(call_hooks(model.block))
    for _ in range(2):
        calls.clear()
        output, state = engine(random(4, 6, WIDTH, dtype=torch.float32)), rng_state()
        engine.backward(scalar(output))
        found.append((len(calls), torch.equal(state, rng_state())))
        engine.step()
    return [*found, hooks - len(call_hooks(model.block)), rejection(lambda: learn(start(row(FailsOnOne), PAIR)))]


def test_what_it_costs():
    for found in run_ranks(costs, 2):
        assert found == [(3, True), (1, True), 1, "no error"]  # whole and sharded in the first update only
