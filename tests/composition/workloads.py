"""What the cells train: small models, each with data from which it learns something within six updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

UPDATES = 6
SAMPLES = 8
"""Of all data ranks and microbatches together, in one update: in every layout the same ones."""
CLASSES = 4
WORDS = 32
CONTEXT = 8


class MLP(nn.Module):
    """Layers of each style that a plan of patterns can give, and one that no pattern names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)  # stays whole
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.again = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x))
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return self.head(F.gelu(self.again(x)))


MLP_POINTS = {2: ("norm",), 4: ("up", "norm", "again")}  # a residual connection stays within a stage, or crosses one
MLP_PLAN = {"up": "colwise", "down": "rowwise", "again": "rowwise_split", "head": "colwise_gather"}


@dataclass(frozen=True)
class Workload:
    """A model and how to train it."""

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]  # inputs and targets of all updates
    lr: float  # so high that a wrong gradient moves the weights visibly, so low that rounding does not grow
    max_norm: float  # clips some of the updates, not all
    plan: str | Mapping[str, str] = "auto"
    sequence: bool = True  # whether the plan says how the sequence is divided
    tokens: bool = False  # whether it takes tokens, [batch, sequence]
    points: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # where so many stages are cut; else "auto"

    def build(self, seed: int = 0) -> nn.Module:
        """The model with initial weights of its own for each seed."""
        torch.manual_seed(seed)
        return self.make()


def criterion(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits, or of a Hugging Face model's output."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _gpt() -> nn.Module:
    from gpt import GPT

    return GPT(context=CONTEXT, width=16, depth=2, num_heads=4, dropout=0.0)


def _vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": CLASSES, "embed_dim": 16, "depth": 2}
    sizes |= {"num_heads": 4, "mlp_ratio": 2.0, "qk_norm": True, "init_values": 0.5}
    model = VisionTransformer(**sizes, class_token=False, global_pool="avg")
    for module in model.modules():
        if isinstance(module, nn.Linear):  # timm's are so small that the blocks would hardly learn in six updates
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model


# The default range of initial weights is for thousands of features.
OF_TRANSFORMERS = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS, "initializer_range": 0.2}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**OF_TRANSFORMERS, "intermediate_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, attention_bias=True, use_cache=False))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**OF_TRANSFORMERS, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4}  # all: which are chosen is no matter of rounding
    return MixtralForCausalLM(MixtralConfig(**sizes, **experts, use_cache=False))


@cache
def _labelled(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around one pattern for each class."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(CLASSES, *shape, generator=generator)
    labels = torch.randint(CLASSES, (UPDATES * SAMPLES,), generator=generator)
    return patterns[labels] + torch.randn(len(labels), *shape, generator=generator), labels


@cache
def _text() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count on from a random word, with the next word as target."""
    start = torch.randint(WORDS, (UPDATES * SAMPLES, 1), generator=torch.Generator().manual_seed(1))
    words = (start + torch.arange(CONTEXT + 1)) % WORDS
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


WORKLOADS = {
    "mlp": Workload(
        MLP, lambda: _labelled(8), lr=0.05, max_norm=0.79, plan=MLP_PLAN, sequence=False, points=MLP_POINTS
    ),
    "gpt": Workload(_gpt, _text, lr=0.05, max_norm=1.9, tokens=True),
    "vit": Workload(_vit, lambda: _labelled(1, 8, 8), lr=0.006, max_norm=4.0),
    "llama": Workload(_llama, _text, lr=0.01, max_norm=3.45, tokens=True),
}
"""The values of the axis `model`."""


def find_workload(name: str) -> Workload:
    """The workload that a cell's `model` names; "mixtral" is not on the axis."""
    return (WORKLOADS | {"mixtral": Workload(_mixtral, _text, lr=0.01, max_norm=3.0, tokens=True)})[name]
