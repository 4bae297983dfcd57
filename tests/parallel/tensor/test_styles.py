"""Layers that a style cannot divide are rejected, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tensor_parity import rejected


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


NOT = "are not divisible by tensor="
PART = "is set, which does not work on a shard of the weight"
ADDED = "this style does not support kdim, vdim, add_bias_kv and add_zero_attn"
UNDIVIDED = [
    ("colwise", lambda: nn.Linear(4, 9), 2, "9 output features are not divisible by tensor=2; tensor can be 1, 3, 9"),
    ("colwise", lambda: nn.Linear(1, 840), 9, f"840 output features {NOT}9; tensor can be 1, 2, 3, 4, 5, 6, 7, 8"),
    ("rowwise_split", lambda: nn.Linear(6, 4), 4, "6 input features are not divisible by tensor=4"),
    ("fused_colwise(3)", lambda: nn.Linear(4, 18), 4, "18 output features in 3 blocks are not divisible by tensor=4"),
    ("fused_colwise(3)", lambda: nn.Linear(4, 8), 2, f"8 output features in 3 blocks {NOT}2"),
    ("vocab", lambda: nn.Embedding(7, 4), 2, "7 vocabulary entries are not divisible by tensor=2; tensor can be 1, 7"),
    ("vocab", lambda: nn.Linear(4, 7), 2, "7 vocabulary entries are not divisible by tensor=2"),
    ("colwise", lambda: nn.Conv2d(4, 8, 1), 2, "it is a Conv2d, but this style is for torch.nn.Linear"),
    ("vocab", lambda: nn.LayerNorm(8), 2, "it is a LayerNorm, but this style is for torch.nn.Embedding"),
    ("colwise", lambda: Scaled(4, 8), 2, "it is a Scaled, but this style is for torch.nn.Linear"),
    ("vocab", lambda: nn.Embedding(8, 4, max_norm=1.0), 2, f"max_norm {PART}"),
    ("vocab", lambda: nn.Embedding(8, 4, scale_grad_by_freq=True), 2, f"scale_grad_by_freq {PART}"),
    ("vocab", lambda: nn.Embedding(8, 4, sparse=True), 2, f"sparse {PART}"),
    ("heads(num_heads)", lambda: nn.MultiheadAttention(6, 3), 2, "3 num_heads are not divisible by tensor=2"),
    ("heads(heads)", lambda: nn.Linear(2, 2), 2, "it has no whole number named 'heads' (found: None)"),
    ("attention", lambda: nn.MultiheadAttention(8, 4, kdim=6), 2, ADDED),
    ("attention", lambda: nn.MultiheadAttention(8, 4, add_zero_attn=True), 2, ADDED),
    ("attention", lambda: nn.MultiheadAttention(8, 4, add_bias_kv=True), 2, ADDED),
    ("attention", lambda: nn.MultiheadAttention(9, 3), 2, "3 heads are not divisible by tensor=2"),
    ("attention", lambda: OwnAttention(8, 4), 2, "it is a OwnAttention, but this style is for torch.nn.Multihead"),
]


@pytest.mark.parametrize(("style", "make", "size", "words"), UNDIVIDED)
def test_layers_that_cannot_be_divided(style, make, size, words):
    model = nn.ModuleDict({"layer": make(), "other": nn.Linear(size, size)})
    assert f"layer ({style}, from plan 'layer'): {words}" in rejected(
        model, {"layer": style, "other": "rowwise"}, size=size
    )


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_a_softmax_over_features_is_no_activation_of_a_sharded_layer(kind):
    model = nn.Sequential(kind(4, 2, 8, activation=nn.Softmax(-1)))
    assert f"0 ({kind.__name__}): its activation is a softmax over features, which are sharded" in rejected(model)
