"""Step 12 of `day.py`: the loss of a language model's head, with all logits at once and in chunks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import gpu
from benchmarks.harness import settle

if TYPE_CHECKING:
    from .day import Page

LOSS_FAILURE = "another loss or gradient in chunks than with all logits, by more than rounding, or a peak of more than "
LOSS_FAILURE += "half. A finding is a time of more than 1.5: the logits' products are computed 4 times for 3."
Loss = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]
MIB = 2**20


def losses_of_a_head(page: Page) -> None:
    page.columns = ["loss", "ms forward and backward", "peak MiB above what there was", "difference"]
    tokens, width, words = (64, 32, 128) if page.rehearses else (8192, 2048, 50304)
    torch.manual_seed(0)
    with page.device:
        head = nn.Linear(width, words, bias=False, dtype=torch.bfloat16)
        x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(words, (tokens,))
    found: list[tuple[float, int, list[torch.Tensor]]] = []

    def measure(loss: Callable[[], Loss]) -> Sequence[Any]:
        seconds, peak, results = run(page, loss(), x, head, targets)
        found.append((seconds, peak, results))
        expected = found[0][2]
        pairs = [(mine.double(), other.double()) for mine, other in zip(results, expected, strict=True)]
        difference = max(((mine - other).norm() / other.norm()).item() for mine, other in pairs)
        if not difference <= 0.02:
            page.fail(f"in chunks: a relative difference of {difference:.2g}")
        return f"{1000 * seconds:.3g}", f"{peak / MIB:.0f}", f"{difference:.1e}"

    page.case("all logits", partial(measure, lambda: whole))
    page.case("in chunks", partial(measure, chunked))
    if len(found) == 2 and not page.rehearses:
        judge(page, *((seconds, peak) for seconds, peak, _ in found))


def judge(page: Page, whole: tuple[float, int], chunks: tuple[float, int]) -> None:
    """Of seconds and bytes."""
    if chunks[1] > 0.5 * whole[1]:
        page.fail(f"in chunks: a peak of {chunks[1] / MIB:.0f} MiB, and {whole[1] / MIB:.0f} with all logits")
    if chunks[0] > 1.5 * whole[0]:
        page.find(f"in chunks: {chunks[0] / whole[0]:.2f} of the time, and 1.33 was predicted")


def whole(x: torch.Tensor, head: nn.Linear, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(x).float(), targets)


def chunked() -> Loss:
    from halfmesh.nn import linear_cross_entropy

    return linear_cross_entropy


def run(
    page: Page, loss: Loss, x: torch.Tensor, head: nn.Linear, targets: torch.Tensor
) -> tuple[float, int, list[torch.Tensor]]:
    """Seconds, bytes at the peak, and the loss with the gradients of input and head."""
    seconds, peak = [], 0
    for number in range(3 if page.rehearses else 8):
        x.grad = head.weight.grad = None
        gpu.free()
        base = gpu.allocated(page.device)
        if number == 1 and page.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        settle()
        begin = time.perf_counter()
        value = loss(x, head, targets)
        value.backward()
        settle()
        seconds.append(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() - base if page.device.type == "cuda" else 0
    grads = [tensor.grad for tensor in (x, head.weight) if tensor.grad is not None]
    return statistics.median(seconds[2:]), peak, [value.detach(), *grads]
