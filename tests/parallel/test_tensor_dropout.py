"""Dropout in a divided model: the masks themselves, and that activation checkpointing meets the same ones again."""

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
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

WORDS, LENGTH, WIDTH, HEADS = 16, 8, 16, 4
Checkpointed = Callable[..., torch.Tensor]


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
    def __init__(self, run: Checkpointed) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Dropout(0.5)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.run("hidden", self._hidden, x))

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, run: Checkpointed) -> None:
        super().__init__()
        self.norm1, self.attention, self.drop1 = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.5)
        self.norm2, self.mlp, self.drop2 = nn.LayerNorm(WIDTH), MLP(run), nn.Dropout(0.5)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop1(self.run("attention", self.attention, self.norm1(x)))
        return x + self.drop2(self.run("mlp", self.mlp, self.norm2(x)))


class Decoder(nn.Module):
    """Args: what is checkpointed ("block", "attention", "mlp", "hidden"), and with which `use_reentrant`."""

    def __init__(self, part: str = "", reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)

        def run(name: str, call: Any, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(call, x, use_reentrant=reentrant) if name == part and self.training else call(x)

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


PLANS = {
    "decoder": LayerPlan(
        (Decoder,),
        {"words": "vocab", "head": "vocab"},
        sequence={"blocks.0": "sequence_begin", "norm": "sequence_end"},
    ),
    "block": LayerPlan(
        (Block,),
        {
            "attention": "heads(num_heads)",
            "attention.[qkv]": "colwise",
            "attention.out": "rowwise",
            "mlp.up": "colwise",
            "mlp.down": "rowwise",
        },
        sequence={"attention": "region", "mlp": "region", "norm?": "sequence", "drop?": "sequence"},
    ),
}


def make_engine(sequence: bool, mode: str = "none", model: Decoder | None = None, **more: Any) -> halfmesh.Engine:
    for name, plan in PLANS.items():
        TENSOR_PLANS.register(name, plan, override=True)
    config = {**MODES[mode], "parallel": {"tensor": {"size": 2, "sequence_parallel": sequence}}, **more}
    return halfmesh.initialize(
        model or Decoder(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda output, ids: nn.functional.cross_entropy(output.flatten(0, 1).float(), ids.flatten()),
        config=config,
        device="cpu",
    )


def ids() -> torch.Tensor:
    return torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def masks(rank: int, world_size: int, sequence: bool) -> dict[str, torch.Tensor]:
    """What each dropout drops in two forwards; the input is the same on all ranks."""
    found: dict[str, torch.Tensor] = {}
    engine = make_engine(sequence)

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: torch.Tensor) -> None:
            assert (args[0] != 0).all()
            found[f"{name} {call}"] = output == 0

        return hook

    for name, module in engine.model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(note(name))
    for call in range(2):
        engine.backward(engine.criterion(engine(ids()), ids()))
        engine.step()
        found[f"after {call}"] = torch.rand(4)
    state = torch.get_rng_state()
    call = 9
    with torch.no_grad():
        engine.eval()(ids())
    found = {name: value for name, value in found.items() if not name.endswith(" 9")}
    assert torch.equal(torch.get_rng_state(), state), "evaluation draws nothing"
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_masks(sequence):
    ranks = run_ranks(masks, 4, sequence)  # (dp, tp): 0 0, 0 1, 1 0, 1 1
    divided = ("attention.drop", "mlp.drop", *(("drop1", "drop2") if sequence else ()))
    names = list(ranks[0])
    assert len(names) == 2 * (1 + 2 * 4 + 1)
    for name in names:
        first, second, third, fourth = (found[name] for found in ranks)
        if name.startswith("blocks") and name.split()[0].split(".", 2)[2] in divided:
            assert not torch.equal(first, second), name
            assert not torch.equal(third, fourth), name
        else:
            assert torch.equal(first, second), name
            assert torch.equal(third, fourth), name
        assert not torch.equal(first, third), name
        assert not torch.equal(second, fourth), name
        if not name.startswith("after"):
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


PARTS = {"none": ("block", "attention", "mlp", "hidden"), "torch_bf16": ("block", "hidden")}


def checkpointed(rank: int, world_size: int, sequence: bool) -> dict[Any, Any]:
    """Losses, gradients and the next random number, with and without activation checkpointing."""
    found = {}
    for mode, parts in PARTS.items():
        for part, reentrant in [("", False), *((part, kind) for part in parts for kind in (False, True))]:
            engine = make_engine(sequence, mode, Decoder(part, reentrant))
            losses, grads = [], {}
            for _ in range(2):
                # Two forwards before the first backward.
                outputs = [engine(ids()), engine(ids())]
                loss = sum(engine.criterion(output, ids()) for output in outputs)
                engine.backward(loss)
                grads = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
                engine.step()
                losses.append(loss.item())
            assert not engine._division.tensor.axis.fork.is_open
            found[mode, part, reentrant] = losses, grads, torch.rand(3)
            engine.close()
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_activation_checkpointing_repeats_the_masks(sequence):
    for found in run_ranks(checkpointed, 2, sequence):
        for mode, parts in PARTS.items():
            losses, grads, after = found[mode, "", False]
            assert losses[0] != losses[1]
            for part in parts:
                for reentrant in (False, True):
                    got = found[mode, part, reentrant]
                    assert got[0] == losses, (mode, part, reentrant)
                    assert torch.equal(got[2], after), (mode, part, reentrant)
                    assert got[1].keys() == grads.keys()
                    for name, grad in grads.items():
                        torch.testing.assert_close(
                            got[1][name], grad, rtol=1e-5, atol=1e-6, msg=f"{mode} {part} {name}"
                        )


def careless(rank: int, world_size: int) -> list[torch.Tensor]:
    """Checkpointing that does not care for random numbers leaves a fork open after backward."""
    model = Decoder()
    mlp = model.blocks[0].mlp
    mlp.run = lambda _, call, x: checkpoint(call, x, use_reentrant=False, preserve_rng_state=False)
    engine = make_engine(sequence=False, model=model)
    found: list[torch.Tensor] = []
    engine.model.drop.register_forward_hook(lambda _, args, output: found.append(output == 0))
    left_open = []
    for _ in range(3):
        engine.backward(engine.criterion(engine(ids()), ids()))
        left_open.append(engine._division.tensor.axis.fork.is_open)
        engine.step()
    assert left_open == [True] * 3
    return found


def test_a_fork_that_a_backward_leaves_open():
    first, second = run_ranks(careless, 2)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], first[1])


class BrokenError(RuntimeError):
    pass


def broken(rank: int, world_size: int) -> list[bool]:
    """An error between divided layers, on all ranks: afterwards they draw in common again."""
    engine = make_engine(sequence=False)
    found = []

    def fail(*_: Any) -> None:
        found.append(engine._division.tensor.axis.fork.is_open)
        raise BrokenError

    handle = engine.model.blocks[0].mlp.drop.register_forward_hook(fail)
    with pytest.raises(BrokenError):
        engine(ids())
    handle.remove()
    return [*found, engine._division.tensor.axis.fork.is_open, torch.rand(1).item()]


def test_an_error_within_a_fork():
    first, second = run_ranks(broken, 2)
    assert first == second
    assert first[:2] == [True, False]
