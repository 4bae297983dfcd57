"""nanoGPT's train.py, tiny: a fused qkv, tied embeddings, batches drawn by hand, lr set by hand, two groups of weights.

What a conversion changes: the model returns logits, and the loss is the criterion's; `view(B, T, -1, head_size)`, since
a tensor rank has some of the heads; `get_batch` takes this data rank's part. The `if` around the step is deleted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import halfmesh

BLOCK, BATCH, VOCABULARY, WIDTH, HEADS, LAYERS = 8, 8, 32, 16, 4, 2
ACCUMULATION, UPDATES, WARMUP = 2, 5, 2
PLAN = {
    "*.attn.c_attn": "fused_colwise(3)",
    "*.attn.c_proj": "rowwise",
    "*.mlp.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
}
PARTITION = ("transformer.h.1",)


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalSelfAttention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(BLOCK, WIDTH),
                "h": nn.ModuleList(Block() for _ in range(LAYERS)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.2)

    def forward(self, idx):
        length = idx.shape[1]
        assert length <= BLOCK, f"cannot forward a sequence of length {length}"
        positions = torch.arange(0, length, dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def make_model() -> nn.Module:
    torch.manual_seed(1337)
    return GPT()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def criterion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)


def make_data() -> torch.Tensor:
    return torch.randint(VOCABULARY, (256,), generator=torch.Generator().manual_seed(1)).cumsum(0) % VOCABULARY


def get_batch(data: torch.Tensor, generator: torch.Generator, rank: int = 0, ranks: int = 1) -> list[torch.Tensor]:
    starts = torch.randint(len(data) - BLOCK, (BATCH,), generator=generator)[rank::ranks]
    return [torch.stack([data[i + shift : i + shift + BLOCK] for i in starts]) for shift in (0, 1)]


def get_lr(update: int) -> float:
    if update < WARMUP:
        return 1e-2 * (update + 1) / (WARMUP + 1)
    ratio = (update - WARMUP) / (UPDATES - WARMUP)
    return 1e-3 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * 9e-3


def train_plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script before the conversion."""
    model, data, generator = make_model(), make_data(), torch.Generator().manual_seed(2)
    optimizer, losses = make_optimizer(model), []
    for update in range(UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(update)
        for _ in range(ACCUMULATION):
            x, y = get_batch(data, generator)
            loss = criterion(model(x), y)
            (loss / ACCUMULATION).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, model.state_dict()


def train(config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script after it."""
    model, data, generator = make_model(), make_data(), torch.Generator().manual_seed(2)
    config = {"clip_grad_norm": 1.0, "gradient_accumulation": ACCUMULATION, **config}
    engine = halfmesh.initialize(model, make_optimizer(model), criterion, config=config, device="cpu")
    losses, context = [], engine.context
    for update in range(UPDATES):
        for group in engine.optimizer.param_groups:
            group["lr"] = get_lr(update)
        for _ in range(ACCUMULATION):
            x, y = get_batch(data, generator, context.dp_rank, context.dp_size)
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.close(restore=True)
    return losses, model.state_dict()
