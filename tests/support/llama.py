"""A plain Llama of any size, how it is sharded, and two small sizes of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from halfmesh import PARTITIONERS, TENSOR_PLANS, BlockPartition, LayerPlan


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, width: int, heads: int, kv_heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.size, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.out = nn.Linear(heads * self.size, width, bias=False)

        angles = torch.arange(length)[:, None] / 500000.0 ** (torch.arange(0, self.size, 2) / self.size).repeat(2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q = self._rotate(self.q(x).view(rows, length, self.heads, self.size).transpose(1, 2))
        k = self._rotate(self.k(x).view(rows, length, self.kv_heads, self.size).transpose(1, 2))
        v = self.v(x).view(rows, length, self.kv_heads, self.size).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, self.heads * self.size))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        length = x.shape[-2]
        return x * self.cos[:length] + torch.cat([-right, left], -1) * self.sin[:length]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, length)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width, depth, heads, kv_heads, inner, vocabulary, length=4096):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, inner, length) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.predict(x)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


OF_BLOCK = {"attention": "heads(heads, kv_heads)", "attention.out": "rowwise", "down": "rowwise"}
OF_BLOCK |= dict.fromkeys(("attention.q", "attention.k", "attention.v", "gate", "up"), "colwise")
OF_MODEL = LayerPlan(layers=(Llama,), styles={"tokens": "vocab", "head": "vocab"})
TENSOR_PLANS.register("plain_llama", OF_MODEL, override=True)
TENSOR_PLANS.register("plain_llama_block", LayerPlan(layers=(Block,), styles=OF_BLOCK), override=True)
PARTITIONERS.register(
    "plain_llama",
    BlockPartition(layers=(Llama,), blocks="blocks", begin=Llama.embed, end=Llama.predict, end_uses=("norm", "head")),
    override=True,
)


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def small():
    ids = torch.zeros(8, 32, dtype=torch.int64)
    return Llama(64, 4, 8, 4, 128, 256, length=32), (ids, ids), _loss


def wide():
    """Half a billion parameters and one short row: weights are nearly all of its memory."""
    ids = torch.zeros(1, 32, dtype=torch.int64)
    return Llama(2048, 8, 16, 8, 8192, 256, length=32), (ids, ids), _loss


SMALL, WIDE = "tests.support.llama:small", "tests.support.llama:wide"
"""What --model is given."""
