"""What stages send to each other: shapes, integers of every kind, and what cannot be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.parallel.pipeline import runner
from tests.support.models import CLASSES, FEATURES, make_data
from tests.support.pipeline_parts import make, pipe, step
from tests.support.ranks import here, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]

LAYERS = 4
inferred: list[int] = []
"""The number of the layer of each forward without data, on this rank."""


class Counted(nn.Linear):
    def __init__(self, number: int) -> None:
        super().__init__(FEATURES, FEATURES)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            inferred.append(self.number)
        return super().forward(x)


def counted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*map(Counted, range(LAYERS)))


def forwards_of_shapes(rank: int, world_size: int) -> dict[str, list[int]]:
    """The layers that are run for each batch, of these rows; three shapes are remembered."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_MOST_SHAPES", 3)
        engine = make(pipe(world_size, microbatches=4), counted(), criterion=lambda output, _: output.mean())
        step(engine, *make_data(8))  # tries microbatches, too
        for name, rows in {"a": 20, "b": 24, "c": 28, "d": 48, "b again": 24, "c again": 28, "a again": 20}.items():
            inferred.clear()
            step(engine, *make_data(rows))
            found[name] = list(inferred)
    return found


def test_a_rank_infers_its_own_stage_once_for_each_shape():
    """And tells it the others; the oldest shapes are forgotten."""
    for rank, found in enumerate(run_ranks(forwards_of_shapes, 2)):
        own = [2 * rank, 2 * rank + 1]
        assert found == dict.fromkeys(found, own) | {"b again": [], "c again": []}


# -- what cannot be sent ---------------------------------------------------------------------------------------------


class Local(nn.Linear):
    """Passes on an object of a class that other ranks cannot find."""

    def forward(self, x: torch.Tensor) -> Any:
        @dataclass
        class Pair:
            y: torch.Tensor

        return Pair(super().forward(x))


def passes(rank: int, world_size: int) -> str:
    model = nn.Sequential(Local(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
    with pytest.raises((AttributeError, RuntimeError)) as caught:
        step(make(model=model), *make_data(8))
    return str(caught.value)


def test_an_object_that_cannot_be_sent_is_told_on_all_ranks():
    assert all("pickle local object 'Local.forward" in told for told in run_ranks(passes, 2))


# -- integers --------------------------------------------------------------------------------------------------------

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NAN32, NAN64 = 0x7F800001, 0x7FF0000000000001  # as floats signalling NaNs, which arithmetic would change


def extremes(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False])
    limits = torch.iinfo(dtype)
    nan = {4: NAN32, 8: NAN64}.get(dtype.itemsize, 0)
    return torch.tensor([limits.min, limits.max, 0, 1, nan, -nan], dtype=dtype)


class Tables(nn.Linear):
    """Integers of every dtype beside the activations."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        for number, dtype in enumerate(INTEGERS):
            self.register_buffer(f"table{number}", extremes(dtype))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": super().forward(x), "tables": [table.expand(len(x), -1) for _, table in self.named_buffers()]}


class Last(nn.Linear):
    def forward(self, tree: dict[str, Any]) -> dict[str, Any]:
        return tree | {"x": super().forward(tree["x"])}


def carries(rank: int, world_size: int) -> Any:
    model = nn.Sequential(Tables(), Last(FEATURES, CLASSES))
    config = pipe(keep_outputs=True, eval_outputs="all")
    engine = make(config, model, criterion=lambda output, target: nn.functional.cross_entropy(output["x"], target))
    trained = step(engine, *make_data(4))[0].value()
    return trained, engine.eval()(here(make_data(3)[0]))


def test_integers_of_every_dtype_arrive():
    for trained, evaluated in run_ranks(carries, 2):
        for output, rows in ((trained, 4), (evaluated, 3)):
            for dtype, found in zip(INTEGERS, output["tables"], strict=True):
                assert found.dtype == dtype
                assert torch.equal(found, extremes(dtype).expand(rows, -1)), dtype
