"""Optimizers under layouts that shard what they step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.support.nano_gpt import CONTEXT, GPT, PLAN, WORDS
from tests.support.proofs import FormatAlone, Row, rows

pytestmark = pytest.mark.distributed

TENSOR = {"tensor": {"size": 2, "plan": PLAN}}


def criterion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt() -> Any:
    return GPT(), (torch.randint(WORDS, (8, CONTEXT)), torch.randint(WORDS, (8, CONTEXT))), criterion


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=0.01)


@rows(
    Row("adamw, tensor", gpt, {"parallel": TENSOR}, optimizer=adamw),
    Row("adamw, fsdp", gpt, {"parallel": {"data": "fsdp"}}, optimizer=adamw),
    Row("adamw, fsdp", gpt, {"parallel": {"data": "fsdp"}}, optimizer=adamw, work=FormatAlone),
)
def test_trains_as_one_process(row):
    row.prove()
