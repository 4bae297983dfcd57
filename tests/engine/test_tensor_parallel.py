"""An engine whose layers are divided: its collectives, targets and rejections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from tests.composition.workloads import criterion, find_workload
from tests.support.models import (
    CLASSES,
    FEATURES,
    make_data,
    make_engine,
    said,
    step_on,
)
from tests.support.proofs import FormatAlone, Row, rows
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed

PLAN = {"up": "colwise", "down": "rowwise", "head": "colwise_gather"}


class Divisible(nn.Module):
    """A layer that is divided by features, one that every rank has whole, and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(nn.functional.gelu(self.up(x)))))


def tensor_config(**more: Any) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": 2, "plan": PLAN}}, **more}


def make(config: dict[str, Any], **options: Any) -> halfmesh.Engine:
    return make_engine(config, model=options.pop("model", None) or Divisible(), **options)


def targets(rank: int, world_size: int) -> list[str]:
    """What is said of targets that the ranks of a tensor group have each for itself: unless they are trained with, of
    the first and of the tenth, and nothing between, where they are the same."""
    engine = make(tensor_config(), criterion=lambda output, *given: nn.functional.cross_entropy(output, given[-1]))
    (x, y), others = here((make_data(8), torch.arange(8).roll(rank) % CLASSES))
    found = [said(lambda: engine.criterion(engine(x), engine(x).softmax(-1)))]
    engine.eval()
    found.append(said(engine.criterion, engine(x), others))
    engine.train()
    with torch.no_grad():
        found.append(said(engine.criterion, engine(x), others))
    found += [said(step_on, engine, x, others if number in (0, 9) else y) for number in range(10)]
    engine.close()
    return found


def test_targets_are_compared_over_a_tensor_group():
    differs = "the ranks of a tensor group got different targets"
    for found in run_ranks(targets, 2):
        assert [differs in text for text in found] == [*[False] * 3, True, *[False] * 8, True]
        assert {text for text in found if differs not in text} == {"nothing"}


def rejections(rank: int, world_size: int) -> dict[str, str]:
    x, y = here(make_data(64))
    engine = make(tensor_config())
    step_on(engine, x, y)
    divided = {"parallel": {"tensor": {"size": 2, "plan": {**PLAN, "head": "colwise"}}}}
    return {"second engine": said(make, {}, model=engine.model), "divided output": said(step_on, make(divided), x, y)}


def test_what_would_be_silently_wrong_is_rejected():
    words = {
        "second engine": "model: another engine sharded it",
        "divided output": "the model's output differs between the ranks of a tensor group",
    }
    for found in run_ranks(rejections, 2):
        assert found.keys() == words.keys()
        for case, message in found.items():
            assert words[case] in message, case


GPT_PLAN = {"*": "auto", "head": "vocab_parallel"}
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2}}


def gpt() -> Any:
    workload = find_workload("gpt")
    return workload.make(), workload.data(), criterion


def config(sequence_parallel: bool = False, axes: Any = None, **more: Any) -> dict[str, Any]:
    tensor = {"size": 2, "plan": GPT_PLAN, "sequence_parallel": sequence_parallel}
    return {"parallel": {"tensor": tensor, **(axes or {})}, **more}


@pytest.mark.promise(
    "a vocabulary larger than the hidden states", "logits stay sharded", of="SageMaker", page="tensor-parallel.md"
)
@rows(
    Row("tensor", gpt, config()),
    Row("accumulated, bf16", gpt, config(bf16={"mode": "torch"}, gradient_accumulation=2), work=FormatAlone),
    Row("context", gpt, config(axes={"context": 2}), 4),
    Row("pipeline", gpt, config(axes=PIPELINE), 4),
)
def test_gpt_is_verified(row):
    row.prove()
