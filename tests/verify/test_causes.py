"""What verify says of a model whose own code is the reason, and how one proves the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh
from halfmesh.errors import InputError
from tests.support.proofs import prove

pytestmark = pytest.mark.distributed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.proj, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.proj(self.first(x)).relu())


class Stateful(Model):
    """Adds what it saw before."""

    seen: Any = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x) + self.seen
        self.seen = h.detach().mean()
        return self.last(self.proj(h))


class Single(Model):
    """Sums over rows in float32, whatever its weights are."""

    def forward(self, x: torch.Tensor) -> Any:
        h = F.linear(x.float(), self.first.weight.float(), self.first.bias.float())
        return self.last(self.proj(h.to(x.dtype)).relu())


def with_data(model: nn.Module) -> tuple[Any, ...]:
    return model, (torch.randn(8, 8), torch.randint(4, (8,))), nn.CrossEntropyLoss()


def made(kind: type[nn.Module]) -> Any:
    return with_data(kind())


def deferred() -> Any:
    with halfmesh.deferred_init():
        model = Model()
    return with_data(model)


def in_batch(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compares each sample with those of all others."""
    return F.cross_entropy(output @ targets.T, torch.arange(len(output)))


def contrastive() -> Any:
    return Model(), (torch.randn(8, 8), torch.randn(8, 4)), in_batch


def normalised() -> Any:
    return with_data(nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)))


def of_unequal_lengths() -> Any:
    batches = [(torch.randn(4, length, 8), torch.randn(4, length, 4)) for length in (3, 5)]
    return Model(), batches, nn.MSELoss()


PIPELINE = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}


def planned(**plan: str) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": 2, "plan": plan}}}


@pytest.mark.parametrize(
    ("config", "build", "ranks", "options", "note"),
    [
        ({}, partial(made, Single), 2, {}, ""),  # casts to float32 go to float64
        ({}, of_unequal_lengths, 2, {"accumulated": True}, ""),
        ({}, contrastive, 2, {"accumulated": True}, "as asked: compared with one process that accumulates"),
        (PIPELINE, normalised, 4, {}, ""),  # by microbatches
        (planned(first="colwise", proj="rowwise"), deferred, 2, {}, ""),
    ],
)
def test_what_is_equal(config, build, ranks, options, note):
    report = prove(config, build, ranks, updates=1, **options)
    assert report.equal, str(report)
    assert note in "".join(report.phases[0].notes)


def test_batches_that_cannot_be_joined_need_accumulation():
    with pytest.raises(InputError, match=r"\(--accumulated gives it batch by batch\): RuntimeError: Sizes of"):
        halfmesh.verify({}, of_unequal_lengths, world_size=2, updates=1)


@pytest.mark.parametrize(
    ("config", "build", "options", "words"),
    [
        ({}, contrastive, {}, "--accumulated (accumulated=True)"),
        ({"gradient_accumulation": 2}, partial(made, Stateful), {}, "keeps state from an earlier call"),
        (planned(proj="rowwise"), deferred, {}, "In 'proj' (RowwiseLinear), with tensor=2."),
        (planned(first="colwise"), deferred, {}, "In 'proj' (Linear), with tensor=2."),
    ],
)
def test_what_is_said_of_what_differs(config, build, options, words):
    report = prove(config, build, 2, updates=1, **options)
    assert not report.equal
    assert words in str(report)
