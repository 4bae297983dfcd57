"""A criterion with weights of the model under fsdp, and gradients that FSDP2 cannot sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh
from halfmesh.errors import InputError
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

X = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(4, (4, 8), generator=torch.Generator().manual_seed(2))


class Weighted(nn.Module):
    """A loss with learned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.project = nn.Parameter(torch.zeros(1)), nn.Linear(4, 4)

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.project(output), labels) * torch.exp(-self.scale[0]) + self.scale.sum()


class HeadLoss(nn.Module):
    """A loss that applies the model's last layer, by its weight."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, self.head.weight, self.head.bias), labels)


class Model(nn.Module):
    def __init__(self, applies_head: bool) -> None:
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(8, 4), nn.Linear(4, 4), Weighted()
        self.applies_head = applies_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden) if self.applies_head else hidden


def make(kind: str) -> tuple[Model, Callable[..., Any]]:
    torch.manual_seed(0)
    model = Model(applies_head=kind != "has a part")
    criteria = {
        "part of the model": model.loss,
        "has a part": HeadLoss(model.head),
        "function": lambda output, labels: F.cross_entropy(model.loss.project(output), labels),  # of the root's weights
    }
    return model, criteria[kind]


def by_hand(kind: str) -> dict[str, torch.Tensor]:
    model, criterion = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in zip(X, Y, strict=True):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return dict(model.state_dict())


def engine_of(model: nn.Module, criterion: Any) -> halfmesh.Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return halfmesh.initialize(model, optimizer, criterion, None, {"parallel": {"data": "fsdp"}}, device=rank_device())


def train(engine: halfmesh.Engine) -> None:
    for x, y in zip(here(X), here(Y), strict=True):
        engine.zero_grad()
        rank = engine.context.dp_rank
        engine.backward(engine.criterion(engine(x.chunk(2)[rank]), y.chunk(2)[rank]))
        engine.step()


KINDS = "part of the model", "has a part", "function"


def with_weights(rank: int, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for kind in KINDS:
        model, criterion = make(kind)
        engine = engine_of(model, criterion)
        train(engine)
        found[kind] = close_whole(engine)
    return found


@pytest.mark.distributed
def test_a_criterion_with_weights_trains_as_by_hand():
    for found in run_ranks(with_weights, 2):
        for kind in KINDS:
            torch.testing.assert_close(found[kind], by_hand(kind))


class Nested(nn.Sequential):
    """A pipeline calls the layers of its blocks one by one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]), nn.Linear(8, 4))


def in_a_pipeline(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    config = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}, "data": "fsdp"}}
    model = Nested()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), None, config, device=rank_device())
    for x, y in zip(here(X), here(Y), strict=True):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    return close_whole(engine)


@pytest.mark.distributed
@pytest.mark.sends
def test_blocks_that_a_pipeline_does_not_call_as_a_whole_train_as_by_hand():
    model = Nested()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in zip(X, Y, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for found in run_ranks(in_a_pipeline, 2):
        torch.testing.assert_close(found, dict(model.state_dict()))


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(12, 4, mode="sum", sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.long() % 12)


def refused(rank: int, world_size: int) -> list[str]:
    said = []
    model = Nested()
    engine = engine_of(model, lambda output, labels: F.cross_entropy(output @ model[0][0][0].weight[:4], labels))
    with pytest.raises(InputError) as caught:
        train(engine)
    engine.close()
    said.append(str(caught.value))
    engine = engine_of(Looked(), nn.CrossEntropyLoss())
    with pytest.raises(InputError) as caught:
        train(engine)
    engine.close()
    said.append(str(caught.value))
    return said


@pytest.mark.distributed
def test_weights_elsewhere_and_sparse_gradients_are_refused():
    for used, called in run_ranks(refused, 2):
        assert used.startswith("weights were used outside of the forward of their module (in the criterion")
        assert called.startswith("a gradient is sparse, which FSDP2 cannot sum")
