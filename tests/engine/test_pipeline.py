"""Losses and outputs under a pipeline: in training, in evaluation, and read by some ranks only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import CLASSES, FEATURES, make_data, said
from tests.support.pipeline_parts import Deep, make, pipe, step
from tests.support.ranks import here, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)


def double_losses(rank: int, world_size: int) -> list[torch.Tensor]:
    x, y = make_data(8)
    engine = make(pipe() | {"loss_reduction": "weighted"}, Deep().double(), criterion=weighted)
    total, weight = step(engine, x.double(), y)[1].value()
    mean = step(make(model=Deep().double()), x.double(), y)[1].value()
    return [mean, total / weight, step(make(), x, y)[1].value()]


def test_a_loss_in_float64_stays_in_float64():
    model, (x, y) = Deep().double(), make_data(8)
    expected = nn.functional.cross_entropy(model(x.double()), y).item()
    for *wide, narrow in run_ranks(double_losses, 2):
        assert [loss.item() for loss in wide] == [pytest.approx(expected, rel=1e-14)] * 2
        assert [loss.dtype for loss in (*wide, narrow)] == [torch.float64, torch.float64, torch.float32]


def readings(rank: int, world_size: int) -> dict[str, Any]:
    """Each rank reads in another pattern: none may wait for another."""
    engine = make(pipe(keep_outputs=True))
    x, y = make_data(8)
    read: list[Any] = []
    for number in range(4):
        output, loss, _ = step(engine, x, y)
        if rank == number % 2:
            read.append((number, loss.item(), output.argmax(1).tolist()))
    engine.eval()
    late = float(loss), [output[i].sum().item() for i in range(8)]
    engine.close()
    return {"read": read, "late": late}


def test_reading_on_one_rank_does_not_hang():
    first, second = run_ranks(readings, 2)
    assert [number for number, *_ in first["read"]] == [0, 2]
    assert [number for number, *_ in second["read"]] == [1, 3]
    assert first["late"] == second["late"]
    model, (x, y) = Deep(), make_data(8)
    assert first["read"][0][1] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-6)
    assert first["read"][0][2] == model(x).argmax(1).tolist()


# -- what the model returns ------------------------------------------------------------------------------------------

WEIGHT = torch.arange(1.0, CLASSES + 1)


class Several(nn.Linear):
    """A stage that returns several things, not all of them tensors."""

    def __init__(self) -> None:
        super().__init__(16, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        scores = super().forward(x)
        return {"scores": scores, "rounded": (scores * 10).long(), "extra": (scores.detach().sum(1), 7)}


def several() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), Several())


def returned(rank: int, world_size: int) -> Any:
    """A loss whose criterion has an argument that is not split; and outputs of training and evaluation."""

    def criterion(output: Any, target: torch.Tensor, weight: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(output["scores"], target, weight=weight, reduction="sum")
        return loss, weight[target].sum()

    config = pipe(keep_outputs=True, eval_outputs="all", non_split=("weight",)) | {"loss_reduction": "weighted"}
    engine = make(config, several(), criterion=criterion)
    x, y = here(make_data(8))
    output = engine(x)
    loss = engine.criterion(output, y, weight=here(WEIGHT))
    engine.backward(loss)
    total, weight = loss.value()
    return total / weight, output.value(), engine.eval()(x)


def test_outputs_of_all_kinds_and_a_criterion_with_an_argument_that_is_not_split():
    x, y = make_data(8)
    expected = several()(x)
    wanted = nn.functional.cross_entropy(expected["scores"], y, weight=WEIGHT)
    for loss, *outputs in run_ranks(returned, 2):
        torch.testing.assert_close((loss, *outputs), (wanted, expected, expected), check_device=False)


# -- evaluation ------------------------------------------------------------------------------------------------------


def evaluations(rank: int, world_size: int, outputs: str) -> tuple[Any, Any]:
    """An output, or what is said of it; and the criterion of it."""
    engine = make(pipe(eval_outputs=outputs))
    x, y = here(make_data(5))
    engine.eval()
    found = []
    for use in (lambda output: output.argmax(1), lambda output: engine.criterion(output, y)):
        output = engine(x)
        has_it = outputs == "all" or engine.context.is_last_stage
        found.append(use(output).detach() if has_it else said(use, output))
    engine.train()
    step(engine, *make_data(8))
    return tuple(found)


@pytest.mark.parametrize("outputs", ["all", "last"])
def test_evaluation_gives_outputs_at_once(outputs):
    first, second = run_ranks(evaluations, 2, outputs)
    model, (x, y) = Deep(), make_data(5)
    expected = model(x).argmax(1), nn.functional.cross_entropy(model(x), y).detach()
    torch.testing.assert_close(second, expected)
    if outputs == "all":
        torch.testing.assert_close(first, expected)
    else:
        assert all("only the ranks with the last stage have the output" in message for message in first)
