"""Criteria under a pipeline: microbatches have to make the loss of the whole batch, or all ranks reject."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models import CLASSES, FEATURES, MODES, make_data, said
from tests.support.pipeline_parts import Deep, make, pipe, step
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


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    output = F.normalize(output)
    return F.cross_entropy(output @ output.T, torch.arange(len(output), device=output.device))


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


OTHER = "One that compares the samples of a batch (a contrastive loss)"
LOSSES: dict[str, tuple[Any, str, str]] = {
    "mean": (F.cross_entropy, "mean", "nothing"),
    "sum": (summed, "mean", "The criterion sums over the samples: set loss_reduction='sum'"),
    "sum as such": (summed, "sum", "nothing"),
    "mean as a sum": (F.cross_entropy, "sum", "The criterion is a mean over the samples: set loss_reduction='mean'"),
    "class weights": (class_weights, "mean", "class weights or ignore_index must return (sum, weight)"),
    "ignore_index": (ignoring, "mean", "class weights or ignore_index must return (sum, weight)"),
    "contrastive": (contrastive, "mean", OTHER),
    "contrastive sum": (lambda o, t: contrastive(o, t) * len(o), "sum", OTHER),
    "weighted": (weighted, "weighted", "nothing"),
    "means, weighted alike": (lambda o, t: (F.cross_entropy(o, t), 1), "weighted", "nothing"),
    "mean with a weight": (lambda o, t: (F.cross_entropy(o, t), len(t)), "weighted", OTHER),
    "draws": (noisy, "mean", "nothing"),  # is not compared
    "cannot take the whole": (for_two_rows, "mean", "nothing"),  # is not compared
    "writes into its targets": (shifts_targets, "mean", "nothing"),
    "chooses by requires_grad": (lambda o, t: F.cross_entropy(o, t) * o.requires_grad, "mean", "nothing"),
}


def each_loss(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name, (criterion, reduction, _) in LOSSES.items():
        engine = make(pipe() | {"loss_reduction": reduction}, criterion=criterion)
        found[name] = said(step, engine, X, Y.clone())
        engine.close()
    for mode in ("torch_bf16", "naive_fp16"):
        for criterion in (F.cross_entropy, class_weights):
            engine = make(pipe() | MODES[mode], criterion=criterion)
            found[f"{mode} {criterion.__name__}"] = said(step, engine, X, Y)
            engine.close()
    return found


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return run_ranks(each_loss, 2)


@pytest.mark.promise(
    "microbatch losses are averaged", "a criterion that is not a mean is rejected", of="SageMaker", page="loop.md"
)
@pytest.mark.parametrize("name", LOSSES)
def test_criteria(name, told):
    first, second = (found[name] for found in told)
    assert first == second
    message = LOSSES[name][2]
    assert first == message if message == "nothing" else message in first


def test_in_half_precision(told):
    for mode in ("torch_bf16", "naive_fp16"):
        assert told[0][f"{mode} cross_entropy"] == "nothing"
        assert "must return (sum, weight)" in told[0][f"{mode} class_weights"]


def test_the_values_are_those_of_one_process(told):
    """With class weights of the batch and of its halves, and without."""
    model = Deep()
    whole, plain = class_weights(model(X), Y).item(), F.cross_entropy(model(X), Y).item()
    halves = [class_weights(model(x), y).item() for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]
    message = told[0]["class weights"]
    assert f"gives {whole:.5f} for the whole batch, but {sum(halves) / 2:.5f}" in message
    words = f"gives {plain / 8:.6f} for the whole batch, but {2 * plain / 8:.6f} for its 2 microbatches (loss"
    assert words in told[0]["mean with a weight"], "the mean of the batch is that of the halves' means"


# -- which outputs are joined, and how -------------------------------------------------------------------------------


class Tree(nn.Module):
    """Returns a dict: the sequence before the batch, and rows of all samples; and a number for each microbatch."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.is_whole = nn.Linear(1, CLASSES), is_whole

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layer(x.unsqueeze(-1))
        found = {"first": x.transpose(0, 1), "rows": [x.flatten(0, 1)]}
        return found if self.is_whole else found | {"number": x.mean()}


def of_tree(output: Any, target: torch.Tensor, rows_loss: Any = F.cross_entropy) -> torch.Tensor:
    each = target.unsqueeze(1).expand(-1, FEATURES).flatten()
    return F.cross_entropy(output["first"].transpose(0, 1).flatten(0, 1), each) + rows_loss(output["rows"][0], each)


def trees(rank: int, world_size: int) -> list[str]:
    found = []
    for model, rows_loss in ((Tree(True), F.cross_entropy), (Tree(True), class_weights), (Tree(False), class_weights)):
        model = nn.Sequential(nn.Linear(FEATURES, FEATURES), model)
        engine = make(model=model, criterion=partial(of_tree, rows_loss=rows_loss))
        found.append(said(step, engine, X, Y))
        engine.close()
    return found


def test_outputs_are_joined_where_their_batch_is():
    """How a number is to be joined is not known: then nothing is compared."""
    for plain, weights, number in run_ranks(trees, 2):
        assert "must return (sum, weight)" in weights
        assert plain == number == "nothing"


# -- later batches, other ranks, and what the comparison leaves ------------------------------------------------------


class Counts(nn.Module):
    """A criterion with state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))
        self.rows: list[int] = []

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.rows.append(len(target))
        return F.cross_entropy(output * self.scale, target)


def later(rank: int, world_size: int) -> dict[str, Any]:
    """2 stages x 2 data ranks."""
    found: dict[str, Any] = {}
    engine = make(criterion=ignoring)
    engine(here(X))  # without a backward it is no training batch
    found["batches"] = [said(step, engine, X, NONE_IGNORED if number < 4 else Y) for number in range(1, 11)]
    engine.close()
    criterion = here(Counts())
    engine = make(criterion=criterion)
    for rows in (8, 8, 2):
        step(engine, X[:rows], Y[:rows])
    found["state"] = int(criterion.calls), criterion.rows
    found["last"] = engine.context.is_last_stage
    engine.close()
    engine = make(criterion=noisy)
    drawn = rng_state()
    step(engine, X, Y)
    found["drawn"] = torch.equal(drawn, rng_state())
    engine.close()
    return found


@pytest.mark.promise("microbatch losses are averaged")
def test_later_batches_and_what_the_comparison_leaves():
    for found in run_ranks(later, 4):
        assert found["batches"][:9] == ["nothing"] * 9
        assert "must return (sum, weight)" in found["batches"][9]
        assert found["drawn"]
        assert found["state"] == ((6, [4, 4, 4, 4, 1, 1]) if found["last"] else (0, []))
