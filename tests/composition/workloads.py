"""What the cells train: four small models, each with data from which it learns something within six updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

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


class Branching(MLP):
    """Some layers see the samples with a positive first feature only, and are not called where there are none. One is
    never called."""

    def __init__(self) -> None:
        super().__init__()
        self.side_norm = nn.LayerNorm(8)
        self.side_up = nn.Linear(8, 16)
        self.side_down = nn.Linear(16, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, :1] > 0
        if chosen.any():
            # x 4: else side_norm.weight, which is 1, moves so little that one rounding of it is beyond the tolerance.
            x = x + 4 * chosen * self.side_down(F.gelu(self.side_up(self.side_norm(x))))
        return super().forward(x)


BRANCHING_PLAN = MLP_PLAN | {"side_up": "colwise", "side_down": "rowwise"}


@dataclass(frozen=True)
class Workload:
    """A model and how to train it.

    Attributes:
        make: the model.
        data: what it sees in all updates, inputs and targets.
        lr: so high that a wrong gradient moves the weights visibly, so low that rounding does not grow.
        max_norm: clips some of the updates, not all.
        plan: `parallel.tensor.plan`.
        sequence: whether the plan says how the sequence is divided.
        tokens: whether it takes tokens, [batch, sequence].
        points: `parallel.pipeline.partition` for each number of stages; elsewhere "auto".
    """

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    lr: float
    max_norm: float
    plan: str | Mapping[str, str] = "auto"
    sequence: bool = True
    tokens: bool = False
    points: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def partition(self, stages: int) -> str | tuple[str, ...]:
        return self.points.get(stages, "auto")

    def build(self, seed: int = 0) -> nn.Module:
        """The model with initial weights of its own for each seed."""
        torch.manual_seed(seed)
        return self.make()

    @property
    def dataset(self) -> TensorDataset:
        return TensorDataset(*self.data())


def criterion(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits, or of a Hugging Face model's output."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _gpt() -> nn.Module:
    from gpt import GPT

    return GPT(context=CONTEXT, width=16, depth=2, num_heads=4, dropout=0.0)


def _vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=8,
        patch_size=4,
        in_chans=1,
        num_classes=CLASSES,
        embed_dim=16,
        depth=2,
        num_heads=4,
        mlp_ratio=2.0,
        class_token=False,
        global_pool="avg",
        qk_norm=True,
        init_values=0.5,
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):  # timm's are so small that the blocks would hardly learn in six updates
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=WORDS,
        tie_word_embeddings=True,
        attention_bias=True,
        use_cache=False,
        initializer_range=0.2,  # for this width; the default is for thousands of features
    )
    return LlamaForCausalLM(config)


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        num_local_experts=4,
        num_experts_per_tok=4,  # all, with weights of their own: which are chosen is no matter of rounding
        use_cache=False,
        initializer_range=0.2,
    )
    return MixtralForCausalLM(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "vocab_size": WORDS}
    nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **nothing, use_cache=False, initializer_range=0.2))


def _frozen_gpt() -> nn.Module:
    """Without gradients: a block, and the embedding with the head that is tied to it."""
    model = _gpt()
    model.blocks[0].requires_grad_(False)
    model.tokens.requires_grad_(False)
    return model


def _frozen_vit() -> nn.Module:
    """Without gradients: what comes before the blocks, and in a block a norm and a divided layer."""
    model = _vit()
    for module in (model.patch_embed, model.blocks[0].norm1, model.blocks[1].mlp.fc1):
        module.requires_grad_(False)
    return model


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@cache
def _labelled(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around one pattern for each class."""
    generator = _generator()
    patterns = torch.randn(CLASSES, *shape, generator=generator)
    labels = torch.randint(CLASSES, (UPDATES * SAMPLES,), generator=generator)
    return patterns[labels] + torch.randn(len(labels), *shape, generator=generator), labels


@cache
def _text() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count on from a random word, with the next word as target."""
    start = torch.randint(WORDS, (UPDATES * SAMPLES, 1), generator=_generator())
    words = (start + torch.arange(CONTEXT + 1)) % WORDS
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def _every_other() -> tuple[torch.Tensor, torch.Tensor]:
    """The first feature is positive in the samples that the second of two data ranks gets."""
    x, labels = _labelled(8)
    x = x.clone()
    x[:, 0] = torch.tensor([-1.0, 1.0]).repeat(len(x) // 2)
    return x, labels


WORKLOADS = {
    "mlp": Workload(
        MLP, lambda: _labelled(8), lr=0.05, max_norm=0.79, plan=MLP_PLAN, sequence=False, points=MLP_POINTS
    ),
    "gpt": Workload(_gpt, _text, lr=0.05, max_norm=1.9, tokens=True),
    "vit": Workload(_vit, lambda: _labelled(1, 8, 8), lr=0.006, max_norm=4.0),
    "llama": Workload(_llama, _text, lr=0.01, max_norm=3.45, tokens=True),
}
"""The values of the axis `model`."""

SPECIAL = {
    "mixtral": Workload(_mixtral, _text, lr=0.01, max_norm=3.0, tokens=True),
    "gpt2": Workload(_gpt2, _text, lr=0.02, max_norm=3.0),
    "branching": Workload(Branching, _every_other, lr=0.05, max_norm=0.79, plan=BRANCHING_PLAN, sequence=False),
    "frozen_gpt": Workload(_frozen_gpt, _text, lr=0.05, max_norm=1.2),
    "frozen_vit": Workload(_frozen_vit, lambda: _labelled(1, 8, 8), lr=0.006, max_norm=3.0),
}
"""Models that are not on an axis: one whose weights are [in, out], and others in which not every parameter has a
gradient."""


def find_workload(name: str) -> Workload:
    """The workload that a cell's `model` names."""
    return (WORKLOADS | SPECIAL)[name]
