"""Dropout in a divided model: which ranks drop alike, and that activation checkpointing meets the same masks again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfmesh
from halfmesh import TENSOR_PLANS, LayerPlan
from tests.support.models import MODES
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import rng_state

pytestmark = pytest.mark.distributed

WORDS, LENGTH, WIDTH, HEADS = 16, 8, 16, 4
Run = Callable[..., torch.Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = self.drop((q @ k.transpose(-2, -1)).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Dropout(0.5)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.run("hidden", self._hidden, x))

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.norm1, self.attention, self.drop1 = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.5)
        self.norm2, self.mlp, self.drop2 = nn.LayerNorm(WIDTH), MLP(run), nn.Dropout(0.5)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop1(self.run("attention", self.attention, self.norm1(x)))
        return x + self.drop2(self.run("mlp", self.mlp, self.norm2(x)))


class Decoder(nn.Module):
    """
    Args:
        part: what is checkpointed: "block", "attention", "mlp", "hidden".
        options: of torch's `checkpoint`.
    """

    def __init__(self, part: str = "", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)

        def run(name: str, call: Any, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(call, x, **options) if name == part and self.training else call(x)

        self.words, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block(run) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.run = run

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(ids))
        for block in self.blocks:
            x = self.run("block", block, x)
        return self.head(self.norm(x))


ENDS = {"blocks.0": "sequence_begin", "norm": "sequence_end"}
BLOCK = {"attention": "heads(num_heads)", "attention.[qkv]": "colwise", "attention.out": "rowwise"}
BLOCK |= {"mlp.up": "colwise", "mlp.down": "rowwise"}
INSIDE = {"attention": "region", "mlp": "region", "norm?": "sequence", "drop?": "sequence"}
PLANS = {
    "decoder": LayerPlan((Decoder,), {"words": "vocab", "head": "vocab"}, sequence=ENDS),
    "block": LayerPlan((Block,), BLOCK, sequence=INSIDE),
}


def make_engine(sequence: bool, mode: str = "none", model: Decoder | None = None) -> halfmesh.Engine:
    for name, plan in PLANS.items():
        TENSOR_PLANS.register(name, plan, override=True)
    return halfmesh.initialize(
        model or Decoder(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda output, ids: nn.functional.cross_entropy(output.flatten(0, 1).float(), ids.flatten()),
        config={**MODES[mode], "parallel": {"tensor": {"size": 2, "sequence_parallel": sequence}}},
        device=rank_device(),
    )


def ids() -> torch.Tensor:
    return here(torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1)))


def update(engine: halfmesh.Engine) -> None:
    engine.backward(engine.criterion(engine(ids()), ids()))
    engine.step()


def masks(rank: int, world_size: int, sequence: bool) -> dict[str, torch.Tensor]:
    """What each dropout drops in two forwards, between which rank 1 draws numbers of its own."""
    found: dict[str, torch.Tensor] = {}
    calls: list[int] = []
    engine = make_engine(sequence)

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            assert (args[0] != 0).all()
            if module.training:
                found[f"{name} {len(calls)}"] = output == 0

        return hook

    for name, module in engine.model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(note(name))
    for call in range(2):
        calls.append(call)
        state = rng_state()
        update(engine)
        assert torch.equal(rng_state(), state), "outside as if the model had drawn nothing"
        if rank == 1:
            torch.rand(3, device=rank_device())
    state = rng_state()
    with torch.no_grad():
        engine.eval()(ids())
    assert torch.equal(rng_state(), state), "evaluation draws nothing"
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_masks(sequence):
    """Ranks of a tensor group drop alike where activations are whole, and differently where they are divided."""
    ranks = run_ranks(masks, 4, sequence)  # (dp, tp): 0 0, 0 1, 1 0, 1 1
    divided = ("attention.drop", "mlp.drop", *(("drop1", "drop2") if sequence else ()))
    assert len(ranks[0]) == 2 * (1 + 2 * 4)
    for name in ranks[0]:
        first, second, third, fourth = (found[name] for found in ranks)
        differ = name.startswith("blocks") and name.split()[0].split(".", 2)[2] in divided
        assert torch.equal(first, second) != differ, name
        assert torch.equal(third, fourth) != differ, name
        assert not torch.equal(first, third), name
        assert not torch.equal(second, fourth), name
        assert 0.25 < first.float().mean() < 0.75, name
    shapes = {name.split()[0]: tuple(mask.shape) for name, mask in ranks[0].items()}
    assert shapes["drop"] == (3, LENGTH, WIDTH)
    assert shapes["blocks.0.drop1"] == (3, LENGTH // 2 if sequence else LENGTH, WIDTH)
    assert shapes["blocks.0.mlp.drop"] == (3, LENGTH, 12)
    assert shapes["blocks.0.attention.drop"] == (3, 2, LENGTH, LENGTH)
    for found in ranks:  # no mask comes twice
        for shape in set(shapes.values()):
            alike = [mask for mask in found.values() if tuple(mask.shape) == shape]
            assert len(torch.stack(alike).unique(dim=0)) == len(alike)


def checkpointed(rank: int, world_size: int, sequence: bool, mode: str, parts: tuple[str, ...]) -> dict[Any, Any]:
    """Losses, gradients and the next random number, with and without activation checkpointing."""
    found = {}
    for part, reentrant in [("", False), *((part, kind) for part in parts for kind in (False, True))]:
        engine = make_engine(sequence, mode, Decoder(part, use_reentrant=reentrant))
        losses = []
        for _ in range(2):
            outputs = [engine(ids()), engine(ids())]  # two forwards before the first backward
            loss = sum(engine.criterion(output, ids()) for output in outputs)
            engine.backward(loss)
            grads = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
            engine.step()
            losses.append(loss.item())
        found[part, reentrant] = losses, grads, torch.rand(3, device=rank_device())
        engine.close()
    return found


@pytest.mark.parametrize(
    ("mode", "sequence", "parts"),
    [
        ("none", False, ("block", "hidden")),
        ("none", True, ("attention",)),
        pytest.param("none", False, ("attention", "mlp"), marks=pytest.mark.slow),
        pytest.param("none", True, ("block", "mlp", "hidden"), marks=pytest.mark.slow),
        ("torch_bf16", True, ("block", "hidden")),
    ],
)
def test_activation_checkpointing_repeats_the_masks(mode, sequence, parts):
    for found in run_ranks(checkpointed, 2, sequence, mode, parts):
        losses, grads, after = found.pop(("", False))
        assert losses[0] != losses[1]
        assert len(found) == 2 * len(parts)
        for case, got in found.items():
            assert got[0] == losses, case
            assert torch.equal(got[2], after), case
            assert got[1].keys() == grads.keys()
            for name, grad in grads.items():
                torch.testing.assert_close(got[1][name], grad, rtol=1e-5, atol=1e-6, msg=f"{case} {name}")


def interrupted(rank: int, world_size: int) -> list[Any]:
    """What is drawn where activations are whole, after a backward that left the order of random numbers, and after an
    error between divided layers."""
    engine = make_engine(False, model=Decoder("hidden", use_reentrant=False, preserve_rng_state=False))
    found: list[Any] = []
    engine.model.drop.register_forward_hook(lambda _, args, output: found.append(output == 0))
    torch.manual_seed(0)
    for _ in range(3):
        update(engine)

    def fail(*_: Any) -> None:
        raise LookupError("between divided layers")

    handle = engine.model.blocks[0].mlp.drop.register_forward_hook(fail)
    with pytest.raises(LookupError):
        engine(ids())
    handle.remove()
    engine(ids())
    return [*found, torch.rand(3, device=rank_device())]


def test_ranks_draw_alike_again_whatever_interrupts_a_divided_layer():
    first, second = run_ranks(interrupted, 2)
    assert len(first) == 6
    assert not torch.equal(first[0], first[1])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
