"""Criteria that communicate, as DINO's, whose centre is a mean over all data ranks: `set_context`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.proofs import FormatAlone, Row, prove, rows


class Centred(nn.Module):
    """Losses of outputs less their running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.context: Any = None
        self.register_buffer("center", torch.zeros(4))

    def set_context(self, context: Any) -> None:
        assert self.context is None, "once"
        self.context = context

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output - self.center, target)
        mean = output.detach().mean(0)
        if self.context is not None:
            self.context.all_reduce(mean, "dp", op="mean")
        self.center = self.center * 0.5 + mean * 0.5
        return loss


def build() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, (torch.randn(16, 8), torch.randint(4, (16,))), Centred()


@pytest.mark.distributed
@rows(
    Row("replicate", build, {}, updates=3),
    Row("tensor", build, {"parallel": {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}}}, updates=3),
    Row("fp16, zero1", build, {"fp16": {"mode": "naive"}, "parallel": {"data": "zero1"}}, work=FormatAlone),
)
def test_they_train_as_in_one_process(row):
    row.prove()


@pytest.mark.distributed
def test_a_pipeline_rejects_a_loss_that_depends_on_the_microbatch_before():
    pipeline = {"size": 2, "microbatches": 2, "partition": ["2"]}
    report = prove({"parallel": {"pipeline": pipeline}}, build, 2)
    assert "for its 2 microbatches (loss_reduction=" in str(report)
