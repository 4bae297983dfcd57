"""The models of `halfmesh verify` alone: small ones with each kind of layer that its layouts shard, and how."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, WORDS, LENGTH, ROWS = 32, 64, 16, 16  # sizes whose halves float8 products take, too


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.size = 4, WIDTH // 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.size)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """As `parallel.expert` takes them: one row of each parameter for an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up, self.down = (nn.Parameter(torch.randn(4, WIDTH, WIDTH) * WIDTH**-0.5) for _ in range(2))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        output = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, nth = (top_k_index == expert).nonzero(as_tuple=True)
            value = F.gelu(hidden_states[token] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, token, (value * top_k_weights[token, nth, None]).to(output.dtype))
        return output


class Mixture(nn.Module):
    """Each token goes to all experts, each with a separate weight: rounding does not choose them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts()

    def forward(self, x: torch.Tensor) -> Any:
        weights, index = self.router(x).flatten(0, 1).softmax(-1).sort(-1)
        return self.experts(x.flatten(0, 1), index, weights).view_as(x)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), mlp

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Logits of the next word, [batch, length, words]. The head is tied to the embedding."""

    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*map(Block, mlps)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.head.weight, std=WIDTH**-0.5)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(position_ids))))


def criterion(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of logits in the last dim."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def _build(*mlps: nn.Module) -> tuple[nn.Module, Any, Any]:
    words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return Transformer(*mlps), (words[:, :-1].contiguous(), words[:, 1:].contiguous()), criterion


def transformer() -> tuple[nn.Module, Any, Any]:
    """A builder, as is the other: the model, (inputs, targets) and the criterion."""
    return _build(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)))


def mixture() -> tuple[nn.Module, Any, Any]:
    return _build(*(Mixture() for _ in range(4)))


PLAN = {"tokens": "vocab", "head": "vocab", "*.attention": "heads(num_heads)", "*.qkv": "fused_colwise(3)"}
PLAN |= {"*.out": "rowwise"}
MLP = {"*.mlp.0": "colwise", "*.mlp.2": "rowwise"}
"""Also of a transformer."""
SEQUENCE = {"blocks.0": "sequence_begin", "norm": "sequence_end", "*.norm?": "sequence"}
SEQUENCE |= {"*attention": "region", "*mlp": "region"}
"""Further entries of a transformer's plan, to divide the sequence."""
