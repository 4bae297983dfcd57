"""The loss of a language model's head, with logits of all tokens and chunk by chunk: memory and time.

python -m benchmarks.fused_loss [--tokens 2048] [--out benchmarks/results/fused_loss.md]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from halfmesh.dry_run.tracker import Tracker
from halfmesh.nn import linear_cross_entropy

from .machine import describe, in_one_line, publish, table

METHOD = """Forward and backward of `F.cross_entropy(head(x).float(), targets)`, and of
`halfmesh.nn.linear_cross_entropy(x, head, targets)` with chunks of 512 tokens and of 128.
*memory* is the most at once above weights and input, the gradients included, in MiB: of storages that torch's operators
made. *time* is the median of the ratios to the first, which takes turns with the others. `torch` is
`F.linear_cross_entropy` with `LinearCrossEntropyOptions(batch_chunk_size=512)`, which computes the gradients in forward
and computes nothing again; its memory is inside of one operator and not seen. The
machine had other work, too: times vary by a third. A GPU spends another share of them on what is not a product."""
COLUMNS = ("weights", "words", "memory, all", "512", "128", "time, 512", "128", "torch, 512")
ROUNDS = 3

Loss = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]


def whole(x: torch.Tensor, head: nn.Linear, targets: torch.Tensor) -> torch.Tensor:
    """All logits at once."""
    return F.cross_entropy(head(x).float(), targets)


def torchs(x: torch.Tensor, head: nn.Linear, targets: torch.Tensor) -> torch.Tensor:
    """torch's own chunks; from torch 2.14 on."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=512)  # type: ignore[attr-defined, unused-ignore]
    fused: Any = getattr(F, "linear_cross_entropy", None)
    found: torch.Tensor = fused(x, head.weight, targets, options=options)
    return found


def measure(dtype: torch.dtype, tokens: int, features: int, words: int) -> list[str]:
    """A row of the table."""
    head = nn.Linear(features, words, bias=False, dtype=dtype)
    x, targets = torch.randn(tokens, features, dtype=dtype, requires_grad=True), torch.randint(words, (tokens,))
    ours: list[Loss] = [partial(linear_cross_entropy, chunk_size=size) for size in (512, 128)]
    timed: list[Loss] = [whole, *ours, *([torchs] if hasattr(F, "linear_cross_entropy") else [])]

    def step(loss: Loss) -> float:
        head.weight.grad = x.grad = None
        start = time.perf_counter()
        loss(x, head, targets).backward()
        return time.perf_counter() - start

    rounds = [list(map(step, timed)) for _ in range(ROUNDS + 1)][1:]
    ratios = [statistics.median(times[i] / times[0] for times in rounds) for i in range(1, len(timed))]
    peaks = []
    for loss in (whole, *ours):
        with Tracker() as tracker:
            step(loss)
            peaks.append(tracker.peak / 2**20)
    figures = *(f"{peak:,.0f}" for peak in peaks), *(f"{ratio:.2f}" for ratio in ratios)
    return [str(dtype).removeprefix("torch."), f"{words:,}", *figures, *["-"] * (4 - len(timed))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--out", type=Path, help="the page (default: print)")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    rows = [
        measure(dtype, chosen.tokens, chosen.features, words)
        for dtype in (torch.float32, torch.bfloat16)
        for words in (8192, 32000, 50304)
    ]
    publish(
        chosen.out,
        "# The loss of a large vocabulary, chunk by chunk",
        f"`python -m benchmarks.fused_loss`: {chosen.tokens:,} tokens, {chosen.features} features; "
        f"{in_one_line(describe())}.",
        METHOD,
        table(COLUMNS, rows),
    )


if __name__ == "__main__":
    main()
