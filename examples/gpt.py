"""A small GPT over bytes, how halfmesh shards it over a tensor group, and splits it into stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from halfmesh import PARTITIONERS, TENSOR_PLANS, BlockPartition, LayerPlan
from halfmesh.nn import linear_cross_entropy

VOCABULARY = 256  # the bytes: any text, and no tokenizer


class Attention(nn.Module):
    """Causal self-attention, [batch, length, width] to the same.

    Attributes:
        num_heads: the heads computed here. A tensor group shards them, with the weights of qkv and out.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = width // num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head_size]
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        # Not x's width: in a tensor group these are fewer heads than x has features for.
        return self.out(heads.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_size))


class MLP(nn.Module):
    """Two linear layers on each position by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each with a norm before it, and dropout on what it adds."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.drop1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Predicts each next byte from those before it.

    Args:
        context: the largest number of bytes that it can look back on.
        width: features of each byte; the heads have to divide it.
        depth: how many blocks.
    """

    def __init__(self, context: int, width: int, depth: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width={width} is not divisible by num_heads={num_heads}")
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # tied: one table turns bytes into features, and back
        self._initialise(width)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of the next byte, [batch, length, 256], for bytes `ids`: int64 [batch, length], length <= context.

        `positions`: of the bytes, int64 [batch, length]; by default they count from 0. halfmesh passes them where each
        rank of a context group has some of the bytes (parallel.context).

        `targets`: the next bytes, int64 [batch, length]. With them it returns the mean cross entropy, in nats, and only
        a chunk of the logits is in memory at a time.
        """
        x = self.embed(ids, positions)
        for block in self.blocks:
            x = block(x)
        if targets is not None:
            return linear_cross_entropy(self.norm(x), self.head, targets)
        return self.predict(x)

    def embed(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Features of each byte at its place, [batch, length, width]. A pipeline gives it all that `forward` takes, and
        returns logits: without `targets`, which are not at its last stage."""
        length = ids.shape[1]
        if length > self.context:
            raise ValueError(f"{length} bytes are more than the context of {self.context}; give the last ones only")
        positions = torch.arange(length, device=ids.device) if positions is None else positions
        features: torch.Tensor = self.drop(self.tokens(ids) + self.positions(positions))
        return features

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, of what the last block returned."""
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self, width: int) -> None:
        """GPT-2's standard deviation of 0.02, made to fit other widths than its 768. What blocks add is smaller in
        deeper models, so that the sum does not grow."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                adds_up = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.5 / (width * (2 * len(self.blocks) if adds_up else 1)) ** 0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


# How a tensor group shards these layers (parallel.tensor in the config). `styles`: who holds what of the weights.
# `sequence`: what sequence_parallel=True adds, where each rank has a shard of the sequence between the sharded layers.
# override: a notebook may run this twice.
TENSOR_PLANS.register(
    "gpt",
    LayerPlan(
        layers=(GPT,),
        styles={"tokens": "vocab", "head": "vocab"},  # each rank has some of the 256 bytes, in both the same
        sequence={"blocks.0": "sequence_begin", "norm": "sequence_end"},
    ),
    override=True,
)
TENSOR_PLANS.register(
    "gpt_block",
    LayerPlan(
        layers=(Block,),
        styles={
            "attention": "heads(num_heads)",
            "attention.qkv": "fused_colwise(3)",  # three projections in one weight, each sharded by itself
            "attention.out": "rowwise",
            "mlp.up": "colwise",
            "mlp.down": "rowwise",
        },
        sequence={
            "attention": "region",
            "mlp": "region",
            "norm1": "sequence",
            "norm2": "sequence",
            "drop1": "sequence",
            "drop2": "sequence",
        },
    ),
    override=True,
)

# How it is cut into the stages of a pipeline (parallel.pipeline in the config): before any block, and at both ends.
PARTITIONERS.register(
    "gpt",
    BlockPartition(layers=(GPT,), blocks="blocks", begin=GPT.embed, end=GPT.predict, end_uses=("norm", "head")),
    override=True,
)
