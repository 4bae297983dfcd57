"""What the engine does around a layout: accumulation, reductions of losses, activations that are not kept."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.composition.workloads import criterion, find_workload
from tests.support.proofs import Row, TeamWork, rows

pytestmark = pytest.mark.distributed

GROUPS = {"tensor": 2, "data": {"reduce_dtype": "float32"}}
SMALL = {"data": {"bucket_mb": 0.0005, "max_inflight": 2}}
ACCUMULATED = {"gradient_accumulation": 2, "clip_grad_norm": 1.0}


def gpt(loss: Callable[[Any, torch.Tensor], Any] = criterion) -> Any:
    workload = find_workload("gpt")
    ids, targets = workload.data()
    return workload.make(), (ids[:8], targets[:8]), loss


def summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def weighted(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of words above 7: other batches have other weights."""
    taken = targets > 7
    return summed(logits, targets.masked_fill(~taken, -100)), taken.sum()


@rows(
    Row("three data ranks", gpt, ACCUMULATED | {"parallel": SMALL}, ranks=3),
    Row("sum, over data ranks only", partial(gpt, summed), {"loss_reduction": "sum", "parallel": GROUPS}, ranks=4),
    Row("weighted", partial(gpt, weighted), ACCUMULATED | {"loss_reduction": "weighted", "parallel": GROUPS}, ranks=4),
    Row(
        "weighted, fp16",
        partial(gpt, weighted),
        ACCUMULATED | {"loss_reduction": "weighted", "fp16": {"mode": "naive", "initial_scale": 256.0}},
        ranks=1,
        work=TeamWork,
    ),
    Row(
        "patterns, zero1", gpt, {"activation_checkpoint": {"patterns": ["blocks.*.mlp"]}, "parallel": {"data": "zero1"}}
    ),
    Row("every second, fsdp", gpt, {"activation_checkpoint": {"every": 2}, "parallel": {"data": "fsdp"}}),
)
def test_trains_as_one_process(row):
    row.prove()
