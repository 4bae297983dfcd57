"""Pipelines: arguments of all kinds, and how the losses of microbatches, batches and data ranks are joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models import CLASSES, FEATURES, make_data
from tests.support.pipeline_parts import Deep, pipe
from tests.support.proofs import Row, rows

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


@dataclass
class Features:
    """Of it the tensor is split, and the rest comes along."""

    x: torch.Tensor
    names: tuple[str, str] = ("a", "b")


class Named(nn.Module):
    """Several inputs and outputs of different kinds; integers and a mask pass from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, FEATURES)
        self.first, self.middle = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids, features, table, scale=None, *, mask=None):
        x = self.words(ids).mean(1) + features.x @ table
        rounded = (x * 10).long()
        y = self.first(x).relu() + x
        if mask is not None:
            y = y * mask[:, None]
        y = self.middle(y) + rounded % 3
        if scale is not None:
            y = y * scale
        return {"scores": self.last(y + x), "rounded": rounded, "extra": (y.detach().sum(1), 7)}


def of_scores(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["scores"], target)


def named() -> Any:
    """Calls of several kinds and sizes, in turn."""
    x, y = make_data(8)
    ids, table, mask = torch.arange(24).view(8, 3) % 10, torch.randn(FEATURES, FEATURES), torch.tensor([1.0, 0.0] * 4)
    calls = [
        (ids, Features(x), table),
        (ids[:4], Features(x[:4]), table, torch.tensor(2.0)),
        {"ids": ids, "features": Features(x), "table": table, "mask": mask},
        {"ids": ids[:4], "features": Features(x[:4]), "table": table, "mask": mask[:4], "scale": torch.tensor(3.0)},
    ]
    sizes = 8, 4, 8, 4
    return Named(), [(call, y[:size]) for call, size in zip(calls, sizes, strict=True)], of_scores


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return summed(output, target), len(target)


def joined(loss: Callable[..., Any], *sizes: int) -> Any:
    """Batches of these sizes."""
    return Deep(), list(zip(*(part.split(sizes) for part in make_data(sum(sizes))), strict=True)), loss


OF_LAYERS = {"partition": ("first", "middle", "last"), "non_split": ("table",)}
JOINED = pipe() | {"gradient_accumulation": 2}
EVEN, UNEVEN = (4, 4, 4, 4, 4, 4, 4, 4), (6, 2, 4, 4, 6, 2, 4, 4)


@pytest.mark.promise(
    "arguments without a batch dimension, outputs on request",
    "`non_split`, `keep_outputs`, `eval_outputs`",
    of="SageMaker",
    page="pipeline.md",
)
@rows(
    Row("arguments", named, pipe(schedule="interleaved", chunks=2, **OF_LAYERS), updates=4),
    Row("sums", partial(joined, summed, *EVEN), JOINED | {"loss_reduction": "sum"}, ranks=4),
    Row("weighted", partial(joined, weighted, *UNEVEN), JOINED | {"loss_reduction": "weighted"}, ranks=4),
)
def test_trains_as_one_process(row):
    row.prove()
