"""What `benchmarks.gpu` trains, and in which modes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .gpu_figures import Shape
from .works import Work, class_loss, make_transformer, token_loss, tokens

VOCABULARY = 50304
"""GPT-2's, rounded up to a multiple of 64."""


@dataclass(frozen=True)
class GpuWork:
    """A model and what its step multiplies."""

    work: Work
    shape: Shape


def gpt(
    title: str,
    depth: int,
    width: int,
    batch: int,
    length: int = 1024,
    vocabulary: int = VOCABULARY,
    head_size: int = 64,
) -> GpuWork:
    def build() -> nn.Module:
        model = make_transformer(depth, width, length, head_size, vocabulary)
        embedding, head = model[0], model[-1]
        assert isinstance(head, nn.Linear)
        head.weight = embedding.tokens.weight  # type: ignore[union-attr,assignment]  # tied, as GPT-2's
        return model

    numbers = depth * 12 * width * width + width * vocabulary
    shape = Shape(((numbers, batch * length),), depth, width, length, batch)
    return GpuWork(Work(title, title, build, lambda: tokens(batch, length, vocabulary), token_loss), shape)


def vit(
    title: str, name: str, batch: int, depth: int = 12, width: int = 768, image: int = 224, patch: int = 16
) -> GpuWork:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, img_size=image)
        return model

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, 3, image, image), torch.randint(0, 1000, (batch,))

    patches = (image // patch) ** 2
    blocks, stem, head = depth * 12 * width * width, 3 * patch * patch * width, 1000 * width
    weights = ((blocks, batch * (patches + 1)), (stem, batch * patches), (head, batch))
    return GpuWork(Work(title, title, build, draw, class_loss), Shape(weights, depth, width, patches + 1, batch))


def works() -> list[GpuWork]:
    """Largest last: they run while memory allows."""
    return [
        vit("ViT-B/16, batch 32", "vit_base_patch16_224", 32),
        gpt("GPT of 124 M, batch 8 x 1024", 12, 768, 8),
        gpt("GPT of 355 M, batch 4 x 1024", 24, 1024, 4),
        gpt("GPT of 774 M, batch 2 x 1024", 36, 1280, 2),
        gpt("GPT of 1.5 B, batch 1 x 1024", 48, 1600, 1),
    ]


def tiny_works() -> list[GpuWork]:
    """To run the same code where nothing large can run."""
    return [
        vit("tiny ViT", "vit_tiny_patch16_224", 2, 12, 192, 32),
        gpt("tiny GPT", 2, 64, 2, length=16, vocabulary=128, head_size=32),
    ]


@dataclass(frozen=True)
class Mode:
    """`precision` is that of the loop it is compared with. `halved`: the model's weights are, and masters are kept."""

    name: str
    precision: str
    config: dict[str, Any]
    halved: bool = False


MODES = [
    Mode("fp32", "fp32", {}),
    Mode("TORCH fp16", "fp16", {"fp16": {"mode": "torch"}}),
    Mode("TORCH bf16", "bf16", {"bf16": {"mode": "torch"}}),
    Mode("NAIVE fp16", "fp16", {"fp16": {"mode": "naive"}}, True),
    Mode("NAIVE bf16", "bf16", {"bf16": {"mode": "naive"}}, True),
    Mode("APEX O2", "fp16", {"fp16": {"mode": "apex", "opt_level": "O2"}}, True),
]
