"""What each style does to a module and takes back, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from halfmesh.parallel.style import parse_style
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import divide, parity, random


def problems(text: str, module: nn.Module, size: int = 2) -> list[str]:
    return list(parse_style(text).find_problems(module, size))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Renamed(nn.Linear):
    """Computes what nn.Linear does."""


def parametrized() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))


def hooked() -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Linear(4, 8))


UNDIVIDED = "are not divisible by tensor="
REFUSED = [
    ("colwise", nn.Linear(4, 9), 2, f"9 output features {UNDIVIDED}2; tensor can be 1, 3, 9"),
    ("colwise_gather", nn.Linear(4, 9), 2, f"9 output features {UNDIVIDED}2; tensor can be 1, 3, 9"),
    ("rowwise", nn.Linear(9, 4), 2, f"9 input features {UNDIVIDED}2; tensor can be 1, 3, 9"),
    ("rowwise_split", nn.Linear(6, 4), 4, f"6 input features {UNDIVIDED}4; tensor can be 1, 2, 3, 6"),
    ("fused_colwise(3)", nn.Linear(4, 18), 4, f"18 output features in 3 blocks {UNDIVIDED}4; tensor can be 1, 2, 3, 6"),
    (
        "fused_colwise(3)",
        nn.Linear(4, 8),
        2,
        f"8 output features in 3 blocks {UNDIVIDED}2; it cannot be divided so at all",
    ),
    ("vocab", nn.Embedding(7, 4), 2, f"7 words {UNDIVIDED}2; tensor can be 1, 7"),
    ("vocab", nn.Linear(4, 7), 2, f"7 words {UNDIVIDED}2; tensor can be 1, 7"),
    ("colwise", nn.Conv2d(4, 8, 1), 2, "it is a Conv2d, and this style is for torch.nn.Linear"),
    ("rowwise", nn.Embedding(8, 8), 2, "it is a Embedding, and this style is for torch.nn.Linear"),
    ("vocab", nn.LayerNorm(8), 2, "it is a LayerNorm, and this style is for torch.nn.Embedding"),
    ("colwise", Scaled(4, 8), 2, "it is a Scaled, and this style is for torch.nn.Linear"),
    ("colwise", parametrized(), 2, "its weight or bias is computed from others (parametrized, pruned"),
    (
        "vocab",
        nn.Embedding(8, 4, max_norm=1.0),
        2,
        "max_norm is set, which is not defined for part of the words; leave",
    ),
    ("vocab", nn.Embedding(8, 4, scale_grad_by_freq=True), 2, "scale_grad_by_freq is set, which is not defined for"),
    (
        "vocab",
        nn.Embedding(8, 4, sparse=True),
        2,
        "sparse is set, which is not defined for part of the words; leave it",
    ),
    ("heads(num_heads)", nn.MultiheadAttention(6, 3), 2, f"3 num_heads {UNDIVIDED}2; tensor can be 1, 3"),
    ("heads(heads)", nn.Linear(2, 2), 2, "it has no whole number named 'heads' (found: None)"),
    ("heads(weight)", nn.Linear(1, 1, bias=False), 2, "it has no whole number named 'weight' (found: Parameter"),
]


@pytest.mark.parametrize(("style", "module", "size", "message"), REFUSED)
def test_what_cannot_be_divided(style, module, size, message):
    found = problems(style, module, size)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_many_sizes_are_not_all_listed():
    (message,) = problems("colwise", nn.Linear(1, 840), 9)
    assert message.endswith("tensor can be 1, 2, 3, 4, 5, 6, 7, 8")


def test_a_weight_that_is_computed():
    (message,) = problems("colwise", hooked())
    assert (
        message
        == "its weight or bias is computed from others (parametrized, pruned), and cannot be cut; undo that first"
    )


@pytest.mark.parametrize(
    "style", ["colwise", "fused_colwise(2)", "rowwise", "rowwise_split", "colwise_gather", "vocab"]
)
def test_a_derived_class_with_the_same_forward_counts(style):
    assert problems(style, Renamed(8, 8)) == []


class Block(nn.Module):
    """An attention whose heads are counted, fused projections, a norm over each head, dropout."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.fast = 4, True
        self.qkv = nn.Linear(8, 24, bias)
        self.q_norm = nn.LayerNorm(2)
        self.drop = nn.Dropout(0.5)
        self.proj = Renamed(8, 8, bias)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 2)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), k, v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(heads.transpose(1, 2).flatten(2))


BLOCK_PLAN = {
    "": "heads(num_heads)",
    "qkv": "fused_colwise(3)",
    "q_norm": "partial",
    "drop": "sequence",
    "proj": "rowwise",
    "*": "off(fast, not_there)",
}


def install(rank: int, world_size: int) -> dict:
    """What is left of the styles after `close`, and what is there before."""
    found: dict = {"parity": [parity(Block(bias), lambda m: m(random(2, 3, 8)), BLOCK_PLAN) for bias in (True, False)]}
    model = Block()
    before = {name: copy.copy(vars(module)) for name, module in model.named_modules()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    params = dict(model.named_parameters())
    tensor = divide(model, BLOCK_PLAN)
    found["divided"] = (
        [type(m).__name__ for m in (model.qkv, model.proj)],
        (model.num_heads, model.fast, model.qkv.out_features, model.proj.in_features, model.proj.out_features),
        [tuple(p.shape) for p in model.parameters()],
        all(dict(model.named_parameters())[name] is param for name, param in params.items()),
        sorted(name for name, p in params.items() if p in tensor.splits),
        sorted(name for name, p in params.items() if p in tensor.partial),
    )
    tensor.close()
    found["kinds"] = {name: type(module) for name, module in model.named_modules()} == kinds
    for name, module in model.named_modules():
        after = dict(vars(module))
        assert after.keys() == before[name].keys(), name
        for attribute, value in before[name].items():
            if "_hooks" in attribute:
                assert len(after[attribute]) == 0, (name, attribute)
            elif isinstance(value, (int, float, str)):
                assert after[attribute] == value, (name, attribute)
    found["same objects"] = all(dict(model.named_parameters())[name] is param for name, param in params.items())
    found["forward"] = torch.equal(model(random(2, 3, 8)), Block()(random(2, 3, 8)))
    return found


@pytest.mark.distributed
def test_styles_are_taken_back():
    for found in run_ranks(install, 2):
        for result in found.pop("parity"):
            assert max(result.output, result.grads) < 1e-14
        kinds, numbers, shapes, same, cut, partial = found.pop("divided")
        assert kinds == ["ColwiseLinear", "RowwiseLinear"]
        assert numbers == (2, False, 12, 4, 8)
        assert shapes == [(12, 8), (12,), (2,), (2,), (8, 4), (8,)]
        assert same
        assert cut == ["proj.weight", "qkv.bias", "qkv.weight"]
        assert partial == ["q_norm.bias", "q_norm.weight"]
        assert all(found.values()), found
