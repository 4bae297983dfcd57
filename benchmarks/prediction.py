"""How long a step should take on a GPU, by what it has to compute and to move: written down before it is measured.

A ratio that comes out otherwise by more than 10 % asks for a reason. With an H100's 798 TFLOP/s and 3.0 TB/s a step of
NAIVE fp16 takes 39 ms for ViT-B/16 with a batch of 128, 0.86 of the autocast loop with fused=True; for a GPT of 1.5 B
49 ms and 0.84, where TORCH fp16 takes 0.89. More bandwidth (an H200 copies 4.3 TB/s) brings these closer to 1.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .harness import settle
from .works import Work

SHARE = 0.65
"""Of the rate of one large product: what the products and attention of a step reach, which are smaller."""
PASSES = {"masters": 78, "autocast": 78 + 34, "fp32": 2 * 78}
"""Half-precision tensors of [tokens, width] that a block's other operations read or write, forward and backward.
Autocast has norms and residuals in fp32."""
COMPILED = 5 / 12
"""Of these, what is left where the operations between two products are one kernel."""
LOSS = 26
"""Bytes a logit that the cross-entropy reads and writes, forward and backward, and its casts."""
CASTS = 12
"""Bytes a parameter, of autocast: weights to half precision, their gradients back."""
UPDATE_BY_HAND = {"fp32": 4 + 8 + 28, "autocast": 4 + 8 + 28, "masters": 6 + 4 + 8 + 28 + 6}
"""Bytes a parameter: the norm, clipping, fused AdamW. Masters: gradients to fp32 first, new weights back."""
UPDATE = {"fp32": 4 + 32, "autocast": 4 + 32, "masters": 2 + 6 + 32 + 6}
"""The same of halfmesh: AdamW clips (and unscales), and NAIVE's norm reads half-precision gradients."""
UNSCALE, WAIT = 8, 5e-4
"""Of GradScaler: bytes a parameter, and seconds in which the device has nothing to do, because the host asks it whether
to step."""


@dataclass(frozen=True)
class Transformer(Work):
    """A Work whose step can be predicted: `tokens` are those of a batch, `vocabulary` the size of their logits."""

    blocks: int = 0
    width: int = 0
    tokens: int = 0
    vocabulary: int = 0


class Limits(NamedTuple):
    """Of the device: FLOP/s of a large product in the mode's dtype, and bytes per second of a copy."""

    products: float
    bandwidth: float


def predict(
    work: Transformer,
    form: str,
    by_hand: bool,
    scales: bool,
    compiled: bool,
    parameters: int,
    flops: float,
    limits: Limits,
) -> float:
    """Seconds of a step with clipping.

    Args:
        form: "fp32", "autocast", or "masters": weights in half precision.
        scales: with a GradScaler.
    """
    between = 2 * PASSES[form] * work.blocks * work.tokens * work.width * (COMPILED if compiled else 1)
    update = (UPDATE_BY_HAND if by_hand else UPDATE)[form] + CASTS * (form == "autocast") + UNSCALE * scales
    moved = between + LOSS * work.tokens * work.vocabulary + update * parameters
    return flops / (SHARE * limits.products) + moved / limits.bandwidth + WAIT * scales


def is_gpu(device: torch.device) -> bool:
    """Return False also for one that is simulated."""
    return device.type == "cuda" and "SIMULATED_GPU" not in os.environ


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large product of random numbers, the best of a few."""
    size = 8192 if is_gpu(device) else 256
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(8):
        settle()
        begin = time.perf_counter()
        torch.matmul(a, b)
        settle()
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy on the device, read and written ones together; the best of a few."""
    size = 1 << (30 if is_gpu(device) else 24)
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        settle()
        begin = time.perf_counter()
        target.copy_(source)
        settle()
        best = max(best, 2 * size / (time.perf_counter() - begin))
    return best
