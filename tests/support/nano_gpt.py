"""A GPT as small scripts write it: fused qkv, sizes from the input's shape, embedding and head tied."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

WORDS, CONTEXT = 20, 8
PLAN = {
    "transformer.h.*.attn": "heads(n_head, n_embd)",
    "transformer.h.*.attn.c_attn": "fused_colwise(3)",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}


class CausalSelfAttention(nn.Module):
    """With sizes from the shape of its input, which is whole also where heads are sharded."""

    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = self.sizes(x)  # noqa: N806 - as such scripts write it
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))

    def sizes(self, x: torch.Tensor) -> tuple[int, int, int]:
        return x.size()


class ShardedAttention(CausalSelfAttention):
    """The one line that tensor parallelism asks for."""

    def sizes(self, x):
        B, T, _ = x.size()  # noqa: N806
        return B, T, self.n_embd


class MLP(nn.Module):
    def __init__(self, n_embd, dropout):
        super().__init__()
        self.c_fc, self.gelu = nn.Linear(n_embd, 4 * n_embd), nn.GELU()
        self.c_proj, self.dropout = nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, attention, n_embd, n_head, dropout):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), attention(n_embd, n_head, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(n_embd), MLP(n_embd, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Returns logits."""

    def __init__(self, attention=ShardedAttention, n_layer=2, n_embd=16, n_head=4, dropout=0.0):
        super().__init__()
        first = {"wte": nn.Embedding(WORDS, n_embd), "wpe": nn.Embedding(CONTEXT, n_embd), "drop": nn.Dropout(dropout)}
        blocks = nn.ModuleList(Block(attention, n_embd, n_head, dropout) for _ in range(n_layer))
        self.transformer = nn.ModuleDict({**first, "h": blocks, "ln_f": nn.LayerNorm(n_embd)})
        self.lm_head = nn.Linear(n_embd, WORDS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.transformer["drop"](self.transformer["wte"](ids) + self.transformer["wpe"](places))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))
