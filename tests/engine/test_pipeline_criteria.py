"""Under a pipeline microbatches have to train as the whole batch: criteria and models that do not are rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models import CLASSES, FEATURES, make_data, said
from tests.support.pipeline_parts import make, pipe, step
from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import rng_state

pytestmark = [pytest.mark.distributed, pytest.mark.sends]

WEIGHT = torch.linspace(1, 4, CLASSES)
IGNORED = 1
X, _ = make_data(8)
Y = torch.tensor([0, 2, 1, 3, 1, 1, 2, 1]) % CLASSES  # the halves differ in how many are ignored
NONE_IGNORED = torch.where(Y == IGNORED, 0, Y)


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def class_weights(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, here(WEIGHT))


def ignoring(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, ignore_index=IGNORED)


def weighted(output: torch.Tensor, target: torch.Tensor) -> Any:
    """What the message says."""
    total = F.cross_entropy(output, target, here(WEIGHT), ignore_index=IGNORED, reduction="sum")
    return total, here(WEIGHT)[target[target != IGNORED]].sum()


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.dropout(output, 0.5), target)


def shifts_targets(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target.add_(1).remainder_(CLASSES))


def for_two_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.view(4, CLASSES), target)


LOSSES: dict[str, tuple[Any, str, str]] = {
    "mean": (F.cross_entropy, "mean", "nothing"),
    "sum": (summed, "mean", "If it sums over the samples, set loss_reduction='sum'"),
    "sum as such": (summed, "sum", "nothing"),
    "mean as a sum": (F.cross_entropy, "sum", "if it averages, 'mean'"),
    "class weights": (class_weights, "mean", "it must return (sum, weight)"),
    "ignore_index": (ignoring, "mean", "it must return (sum, weight)"),
    "weighted": (weighted, "weighted", "nothing"),
    "mean with a weight": (lambda o, t: (F.cross_entropy(o, t), len(t)), "weighted", "be split into microbatches"),
    "draws": (noisy, "mean", "nothing"),  # is not compared
    "cannot take the whole": (for_two_rows, "mean", "nothing"),  # is not compared
    "writes into its targets": (shifts_targets, "mean", "nothing"),
}


def each_loss(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name, (criterion, reduction, _) in LOSSES.items():
        engine = make(pipe() | {"loss_reduction": reduction}, criterion=criterion)
        found[name] = said(step, engine, X, Y.clone())
        engine.close()
    return found


@pytest.mark.promise(
    "microbatch losses are averaged", "a criterion that is not a mean is rejected", of="SageMaker", page="loop.md"
)
def test_criteria():
    first, second = run_ranks(each_loss, 2)
    assert first == second
    for name, (*_, message) in LOSSES.items():
        assert first[name] == message if message == "nothing" else message in first[name], name


def later(rank: int, world_size: int) -> tuple[list[str], bool]:
    """2 stages x 2 data ranks."""
    engine = make(criterion=ignoring)
    engine(here(X))  # without a backward it is no training batch
    found = [said(step, engine, X, NONE_IGNORED if number < 4 else Y) for number in range(1, 11)]
    engine.close()
    engine = make(criterion=noisy)
    drawn = rng_state()
    step(engine, X, Y)
    return found, torch.equal(drawn, rng_state())


def test_later_batches_and_what_the_comparison_leaves():
    for batches, keeps_random_numbers in run_ranks(later, 4):
        assert batches[:9] == ["nothing"] * 9
        assert "must return (sum, weight)" in batches[9]
        assert keeps_random_numbers


class Does(nn.Module):
    def __init__(self, how: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(x, self.training)


MIXED: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Does(lambda x, training: (x @ x.T).softmax(-1) @ x),
    "in training": lambda: Does(lambda x, training: x / x.std(0) if training else x),
    "with dropout": lambda: nn.Sequential(nn.Dropout(), Does(lambda x, training: F.normalize(x, dim=0))),
    "with noise": lambda: Does(lambda x, training: F.dropout(x, 0.5, training) - x.mean(0)),
    "capacity": lambda: Does(lambda x, training: x * (torch.arange(len(x), device=x.device) < 3)[:, None]),
}


OWN: tuple[Callable[[], nn.Module], ...] = (
    nn.Dropout,
    lambda: Does(lambda x, training: x + torch.randn_like(x)),
    lambda: Does(lambda x, training: x.bfloat16().float()),
    lambda: nn.BatchNorm1d(16),
)


def deep(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), *between, nn.Linear(16, CLASSES))


def of_rows(rank: int, world_size: int) -> dict[str, Any]:
    """What is said of each model, and of one whose first batch cannot be split; and statistics of training."""
    (x, y), found = here(make_data(8)), {}
    for name, layer in MIXED.items():
        found[name] = said(step, make(pipe(microbatches=4), deep(layer())), x, y)
    engine = make(pipe(microbatches=4, schedule="gpipe"), deep(MIXED["attention"]()))
    step(engine, x[:1], y[:1])
    found["later"] = said(step, engine, x, y)
    engine = make(pipe(microbatches=4), deep(*(layer() for layer in OWN)))
    step(engine, x, y)
    assert all(module.training for module in engine.model.modules())
    return found | dict(engine.model.state_dict())


def test_mixed_rows_are_rejected_and_rows_by_themselves_are_trained():
    found = run_ranks(of_rows, 2)
    for name in (*MIXED, "later"):
        for each in found:
            message = "computes different outputs for the first 2 microbatches together and one by one"
            assert message in each[name], name
    assert (found[0] | found[1])["5.num_batches_tracked"] == 4
