"""The loop under a pipeline: losses, inputs, outputs, evaluation and ragged batches are those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.utils.tensors import tensors_of
from tests.support.models import CLASSES, FEATURES, difference, make_data, said, sgd
from tests.support.pipeline_parts import Deep, make, pipe, step, whole
from tests.support.ranks import here, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


CRITERIA = {
    "mean": nn.functional.cross_entropy,
    "sum": summed,
    "weighted": lambda output, target: (summed(output, target), len(target)),
}


def joined_losses(rank: int, world_size: int) -> dict[str, Any]:
    """2 stages x 2 data ranks, cycles of 2 batches; weighted ones are of different size."""
    found: dict[str, Any] = {}
    x, y = make_data(32)
    for reduction, criterion in CRITERIA.items():
        engine = make(pipe() | {"loss_reduction": reduction, "gradient_accumulation": 2}, criterion=criterion)
        even = ((0, 4), (4, 8)), ((8, 12), (12, 16))
        uneven = ((0, 6), (6, 10)), ((10, 12), (12, 16))
        losses = []
        for begin in (0, 16):
            for part in (uneven if reduction == "weighted" else even)[engine.context.dp_rank]:
                piece = slice(begin + part[0], begin + part[1])
                _, loss, _ = step(engine, x[piece], y[piece])
                value = loss.value()
                losses.append([float(v) for v in value] if reduction == "weighted" else value.item())
        found[reduction] = losses, whole(engine)
    return found


def test_microbatches_accumulation_and_data_ranks_join_their_losses():
    results = run_ranks(joined_losses, 4)
    x, y = make_data(32)
    for reduction in CRITERIA:
        model = Deep()
        optimizer = sgd(model.parameters())
        for begin in (0, 16):
            optimizer.zero_grad()
            output, target = model(x[begin : begin + 16]), y[begin : begin + 16]
            if begin == 0:
                first = summed(model(x[:4]), y[:4]).item()
            total = summed(output, target)
            (total if reduction == "sum" else total / 16).backward()
            optimizer.step()
        for result in results:
            assert difference(result[reduction][1], model) < 1e-6
            if reduction != "weighted":  # of the first batch of the first data rank, on both of its stages
                expected = first if reduction == "sum" else first / 4
                assert results[0][reduction][0][0] == pytest.approx(expected, rel=1e-6)
        stages = [(results[0], results[2]), (results[1], results[3])]
        assert all(first[reduction][0] == second[reduction][0] for first, second in stages)
    assert [weight for _, weight in results[0]["weighted"][0]] == [6, 4, 6, 4]
    assert [weight for _, weight in results[1]["weighted"][0]] == [2, 4, 2, 4]


def double_losses(rank: int, world_size: int) -> list[torch.Tensor]:
    x, y = make_data(8)
    weighted = make(pipe() | {"loss_reduction": "weighted"}, Deep().double(), criterion=CRITERIA["weighted"])
    total, weight = step(weighted, x.double(), y)[1].value()
    mean = step(make(model=Deep().double()), x.double(), y)[1].value()
    return [mean, total / weight, step(make(), x, y)[1].value()]


def test_a_loss_in_float64_stays_in_float64():
    model, (x, y) = Deep().double(), make_data(8)
    expected = nn.functional.cross_entropy(model(x.double()), y).item()
    for *wide, narrow in run_ranks(double_losses, 2):
        assert [loss.item() for loss in wide] == [pytest.approx(expected, rel=1e-14)] * 2
        assert [loss.dtype for loss in (*wide, narrow)] == [torch.float64, torch.float64, torch.float32]


# -- reading -----------------------------------------------------------------------------------------------


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
    first, second = run_ranks(readings, 2, timeout=60)
    assert [number for number, *_ in first["read"]] == [0, 2]
    assert [number for number, *_ in second["read"]] == [1, 3]
    assert first["late"] == second["late"]
    model, (x, y) = Deep(), make_data(8)
    assert first["read"][0][1] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-6)
    assert first["read"][0][2] == model(x).argmax(1).tolist()


@dataclass
class Features:
    """Of it the tensor is split, and the rest comes along."""

    x: torch.Tensor
    names: tuple[str, str] = ("a", "b")


class Named(nn.Module):
    """Several inputs and outputs of different kinds; integers and a mask pass from stage to stage."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(10, FEATURES)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.middle = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids, features, table, scale=None, *, mask=None):
        x = self.words(ids).mean(1) + features.x @ table
        rounded = (x * 10).long()
        y = self.first(x).relu() + x
        if mask is not None:
            y = y * mask[:, None]
        y = self.middle(y) + rounded % 3
        if scale is not None:
            y = y * scale
        return {"scores": self.last(y + x), "rounded": rounded, "extra": (y.detach().sum(1), 7)}


GIVEN = {
    "ids": torch.arange(24).view(8, 3) % 10,
    "features": Features(make_data(8)[0]),
    "table": torch.eye(FEATURES) * 0.5,
    "scale": torch.tensor(2.0),
    "mask": torch.tensor([1.0, 0.0] * 4),
}
WEIGHT = torch.arange(1.0, CLASSES + 1)
NAMED_CALLS: list[tuple[int, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = [
    (8, ("ids", "features", "table"), (), {}),
    (4, ("ids", "features", "table", "scale"), (), {"weight": WEIGHT}),
    (8, ("ids", "features"), ("table", "mask"), {}),
    (8, (), tuple(GIVEN), {"weight": WEIGHT}),
]
"""Rows of a batch, arguments by position and by name, and those of the criterion."""


def named_criterion(output: Any, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return nn.functional.cross_entropy(output["scores"], target, weight=weight)


def rows_of(name: str, begin: int, end: int) -> Any:
    value = GIVEN[name]
    if isinstance(value, Features):
        return Features(here(value.x[begin:end]))
    return here(value if name in ("table", "scale") else value[begin:end])


def named(rank: int, world_size: int) -> dict[str, Any]:
    """Calls of several kinds and shapes, in turn."""
    options = {"chunks": 2, "schedule": "interleaved", "keep_outputs": True, "eval_outputs": "all"}
    options["non_split"] = ("table", "weight")
    config = pipe(partition=("first", "middle", "last"), **options)
    engine = make(config, Named(), criterion=named_criterion)
    y, seen = here(make_data(8)[1]), []
    for rows, args, kwargs, more in [*NAMED_CALLS, NAMED_CALLS[0]]:
        engine.zero_grad()
        output = engine(*(rows_of(n, 0, rows) for n in args), **{n: rows_of(n, 0, rows) for n in kwargs})
        loss = engine.criterion(output, y[:rows], **here(more))
        engine.backward(loss)
        engine.step()
        seen.append((loss.item(), output.value()))
    engine.eval()
    return {
        "seen": seen,
        "evaluated": engine(**{n: rows_of(n, 0, 8) for n in NAMED_CALLS[0][1]}),
        "weights": whole(engine),
    }


@pytest.mark.promise(
    "arguments without a batch dimension",
    "`non_split`",
    of="SageMaker",
    page="pipeline.md",
)
def test_inputs_of_all_kinds_and_arguments_that_are_not_split():
    results = run_ranks(named, 2)
    model, y, expected = Named(), make_data(8)[1], []
    optimizer = sgd(model.parameters())
    for rows, args, kwargs, more in [*NAMED_CALLS, NAMED_CALLS[0]]:
        optimizer.zero_grad()
        outputs, losses = [], []
        for begin, end in ((0, rows // 2), (rows // 2, rows)):  # a weighted mean is not the mean of halves
            outputs.append(model(**{n: rows_of(n, begin, end) for n in (*args, *kwargs)}))
            losses.append(named_criterion(outputs[-1], y[begin:end], **more) / 2)
        sum(losses).backward()
        optimizer.step()
        tensors = [torch.cat(parts).detach() for parts in zip(*map(tensors_of, outputs), strict=True)]
        expected.append((sum(losses).item(), tensors))
    evaluated = tensors_of(model.eval()(**{n: GIVEN[n] for n in NAMED_CALLS[0][1]}))
    for result in results:
        for (loss, output), (wanted, tensors) in zip(result["seen"], expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5)
            torch.testing.assert_close(tensors_of(output), tensors)
            assert output["extra"][1] == 7
        assert difference(result["weights"], model) < 1e-6
        torch.testing.assert_close(tensors_of(result["evaluated"]), [t.detach() for t in evaluated])


# -- evaluation


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
