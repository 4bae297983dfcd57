"""What is trained: models of a few sizes, with fixed weights and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class SelfAttention(nn.Module):
    """Causal, with the heads next to each other in one projection, so that a tensor group can divide its rows."""

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, 3, self.head_size)
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, head_size)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    """Of tokens and of their places."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


def make_transformer(
    depth: int = 4, width: int = 128, context: int = 64, head_size: int = 32, vocabulary: int = VOCABULARY
) -> nn.Sequential:
    """A GPT as a Sequential, which pipelines of both sides can cut: embedding, blocks, norm, head."""
    blocks = [Block(width, head_size) for _ in range(depth)]
    model = nn.Sequential(
        Embedding(vocabulary, context, width), *blocks, nn.LayerNorm(width), nn.Linear(width, vocabulary)
    )
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


def make_mlp() -> nn.Sequential:
    linears = [nn.Linear(32, 32) for _ in range(4)]
    return nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2], nn.ReLU(), linears[3])


def make_vit() -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    return model


def class_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 32), torch.randint(0, 32, (8,))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))


def tokens(batch: int = 8, length: int = 64, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True)
class Work:
    """A model, a batch and a loss. `warm` steps are taken before anything is measured."""

    title: str
    build: Callable[[], nn.Module]
    draw: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    warm: int = 10

    def model(self) -> nn.Module:
        """Every call returns a copy of its own, with the same weights."""
        torch.manual_seed(0)
        return self.build()

    def batch(self, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        return self.draw()


WORKS = {
    "mlp": Work("MLP: 4 x Linear(32, 32), batch 8", make_mlp, vectors, class_loss),
    "transformer": Work(
        "transformer: 4 blocks of width 128, 0.87 M parameters, batch 8 x 64",
        make_transformer,
        tokens,
        token_loss,
        warm=3,
    ),
    "vit": Work(
        "ViT: timm's vit_tiny_patch16_224, 5.5 M parameters, batch 8 of 64 x 64",
        make_vit,
        images,
        class_loss,
        warm=3,
    ),
}
