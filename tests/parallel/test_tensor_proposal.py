"""The plan that is proposed for a model that no registered plan knows: it can be pasted, and trains."""

from __future__ import annotations

import ast
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh
from tests.support.nano_gpt import CONTEXT, GPT, PLAN, WORDS, CausalSelfAttention
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import apart, refused


def proposed(model: nn.Module, size: int = 2) -> dict[str, str] | None:
    """The plan in the refusal, as somebody who pastes it has it."""
    found = re.search(
        r"parallel = dict\(tensor=dict\(size=(\d+), plan=(\{.*?\})\)\)", refused(model, size=size), re.DOTALL
    )
    if found is None:
        return None
    assert int(found[1]) == size
    return ast.literal_eval(found[2])


class Layers(nn.Module):
    """Linear layers by name: features that they take and give."""

    def __init__(self, num_heads: int | None = None, **sizes: tuple[int, int]) -> None:
        super().__init__()
        if num_heads:
            self.num_heads, self.head_dim = num_heads, 2
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(*size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def row(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


def tied() -> nn.Module:
    """A head that shares its weight with an embedding stays whole."""
    model = Layers(project=(16, 8), head=(8, WORDS))
    model.words = nn.Embedding(WORDS, 8)
    model.head.weight = model.words.weight
    return model


QKVO = {"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8)}


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (GPT(), PLAN),
        (row(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), {"0": "colwise", "2": "rowwise"}),
        (row(row(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 3)), {"*.0": "colwise", "*.1": "rowwise"}),
        (
            row(*(row(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))),
            {"*.0": "colwise", "*.2": "rowwise"},
        ),
        (Layers(**QKVO), dict.fromkeys("qkv", "colwise") | {"o": "rowwise"}),
        (
            row(*(Layers(4, **QKVO, up=(8, 24), gate=(8, 24), down=(24, 8)) for _ in range(2))),
            {f"*.{name}": "colwise" for name in ("up", "gate", "q", "k", "v")}
            | {"*.down": "rowwise", "*.o": "rowwise", "0": "heads(num_heads)", "1": "heads(num_heads)"},
        ),
        (Layers(up=(8, 32), down=(16, 8)), {"up": "fused_colwise(2)", "down": "rowwise"}),
        (Layers(a=(8, 8), b=(8, 8), c=(8, 8)), {"b": "colwise", "c": "rowwise"}),
        (Layers(up=(8, 15), down=(15, 8)), None),  # 2 ranks do not divide it
        (Layers(3, **dict.fromkeys("qkvo", (6, 6))), None),  # nor the heads
        (row(nn.Linear(8, 4), nn.Linear(8, 4)), None),
        (tied(), None),
    ],
)
def test_proposals(model, plan):
    assert proposed(model) == plan


def test_what_forward_has_to_do_is_said():
    message = refused(GPT(CausalSelfAttention))
    assert "forward sees 1 / 2 of the features. Sizes have to be -1 there (view(B, T, -1, head_dim), chunk(" in message
    assert "come from what 'heads(n_head, n_embd)' makes this rank's" in message
    assert "after `B, T, C = x.size()` write `C = self.n_embd`" in message
    assert "heads(" not in refused(Layers(up=(8, 16), down=(16, 8)))


def trained(model: nn.Module, engine: halfmesh.Engine | None = None) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = None if engine else torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        ids = torch.randint(WORDS, (4, CONTEXT + 1), generator=generator)
        output = (engine or model)(ids[:, :-1])
        loss = F.cross_entropy(output.flatten(0, 1), ids[:, 1:].flatten())
        if engine:
            engine.backward(loss)
            engine.step()
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def pasted(rank: int, world_size: int) -> tuple[float, float, str]:
    torch.manual_seed(0)
    whole = GPT().double()
    torch.manual_seed(0)
    model = GPT().double()
    before = [param.detach().clone() for param in model.parameters()]
    config = {"parallel": {"tensor": {"size": 2, "plan": proposed(GPT())}}}
    engine = halfmesh.initialize(model, lambda p: torch.optim.AdamW(p, lr=1e-2), config=config, device="cpu")
    assert engine.model.get_parameter("transformer.h.0.attn.c_attn.weight").shape == (24, 16)
    trained(model, engine)
    engine.close(restore=True)
    trained(whole)
    moved = max(apart(a, b) for a, b in zip(before, whole.parameters(), strict=True))
    found = max(apart(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    unchanged = halfmesh.initialize(
        GPT(CausalSelfAttention), lambda p: torch.optim.SGD(p, lr=1e-2), config=config, device="cpu"
    )
    try:
        trained(unchanged.model, unchanged)
    except RuntimeError as error:
        return found, moved, "\n".join([str(error), *error.__notes__])
    return found, moved, ""


@pytest.mark.distributed
def test_a_gpt_of_small_scripts_trains_with_the_pasted_plan_and_one_line_changed():
    for found, moved, message in run_ranks(pasted, 2):
        assert found < 1e-9 < 1e-2 < moved
        assert "is invalid for input of size" in message  # without that line
        assert "parallel.tensor.plan shards transformer.h.0.attn, transformer.h.0.mlp. Between" in message
