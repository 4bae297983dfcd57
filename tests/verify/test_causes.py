"""What verify says of a model whose own code is the reason, and how one proves the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh

pytestmark = pytest.mark.distributed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.proj, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.kept = torch.zeros(16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.proj(self.first(x)).relu())


class Keeping(Model):
    """Adds what it has seen in earlier calls."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        out = self.last(h + self.kept)
        self.kept = self.kept + h.detach().mean(0)
        return out


class RankDependent(Model):
    def forward(self, x: torch.Tensor) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self.last(self.first(x) * (1 + rank))


class Single(Model):
    """Sums over rows in float32, whatever its weights are."""

    def forward(self, x: torch.Tensor) -> Any:
        h = F.linear(x.float(), self.first.weight.float(), self.first.bias.float())
        return self.last(self.proj(h.to(x.dtype)).relu())


def with_data(model: nn.Module) -> tuple[Any, ...]:
    return model, (torch.randn(8, 8), torch.randint(4, (8,))), nn.CrossEntropyLoss()


def single() -> Any:
    return with_data(Single())


def keeping() -> Any:
    return with_data(Keeping())


def deferred() -> Any:
    with halfmesh.deferred_init():
        model = Model()
    return with_data(model)


def in_batch(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compares each sample with those of all others."""
    return F.cross_entropy(output @ targets.T, torch.arange(len(output)))


def contrastive() -> Any:
    return Model(), (torch.randn(8, 8), torch.randn(8, 4)), in_batch


def contrastive_and_wrong() -> Any:
    return RankDependent(), (torch.randn(8, 8), torch.randn(8, 4)), in_batch


def normalised() -> Any:
    return with_data(nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)))


def of_unequal_lengths() -> Any:
    batches = [(torch.randn(4, length, 8), torch.randn(4, length, 4)) for length in (3, 5)]
    return Model(), batches, nn.MSELoss()


def tensor(**plan: str) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": 2, "plan": plan}}}


def test_state_that_is_kept_from_call_to_call_is_named_in_the_first_update():
    first = halfmesh.verify({"gradient_accumulation": 2}, keeping, world_size=2, updates=1).first
    assert first is not None
    assert (first.step, first.cause[:38]) == (0, "something is kept from an earlier call")


def test_sums_that_the_model_makes_in_float32_are_proven_in_float64():
    report = halfmesh.verify({}, single, world_size=2, updates=1)
    assert report.equal, str(report)
    assert report.phases[0].notes == (
        "the model computes in float32 in places; for the proof these were lifted to float64",
    )


def test_a_loss_within_each_ranks_batch_is_proven_as_accumulated():
    report = halfmesh.verify({}, contrastive, world_size=2, updates=1)
    assert report.first is not None
    assert "--accumulated (accumulated=True)" in report.first.advice
    report = halfmesh.verify({}, contrastive, world_size=2, updates=1, accumulated=True)
    assert report.equal, str(report)
    assert "as asked: compared with one process that accumulates" in report.phases[0].notes[0]
    wrong = halfmesh.verify({}, contrastive_and_wrong, world_size=2, updates=1, accumulated=True)
    assert wrong.first is not None
    assert (wrong.first.what, wrong.first.ranks) == ("output", (1,))


def test_batchnorm_in_a_pipeline_is_compared_by_microbatches():
    config = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
    report = halfmesh.verify(config, normalised, world_size=4, updates=1)
    assert report.equal, str(report)


def test_batches_that_cannot_be_joined_are_accumulated_in_one_process():
    report = halfmesh.verify({}, of_unequal_lengths, world_size=2, updates=1)
    assert report.equal, str(report)
    assert "accumulates, since it cannot take the whole batch: RuntimeError: Sizes of" in report.phases[0].notes[0]


def test_a_deferred_model_gets_its_values():
    report = halfmesh.verify(tensor(first="colwise", proj="rowwise"), deferred, world_size=2, updates=1)
    assert report.equal, str(report)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"proj": "rowwise"},
            "proj (rowwise, from plan 'proj'): it takes this rank's 8 features, but",
        ),
        ({"first": "colwise"}, "In 'proj' (Linear), with tensor=2."),
    ],
)
def test_an_error_of_a_plan_names_the_layer(plan, words):
    report = halfmesh.verify(tensor(**plan), deferred, world_size=2, updates=1)
    assert not report.equal
    assert words in str(report)
