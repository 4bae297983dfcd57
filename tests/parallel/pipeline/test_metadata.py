"""Each rank finds the shapes of its own stages only, and tells them the others; the oldest ones are forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.parallel.pipeline import runner
from tests.support.models import CLASSES, FEATURES, make_data, said
from tests.support.pipeline_parts import make, pipe, step
from tests.support.ranks import here, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]

LAYERS = 8
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
    for rank, found in enumerate(run_ranks(forwards_of_shapes, 4)):
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


# -- modes that one rank changes -------------------------------------------------------------------------------------


def changes_modes(rank: int, world_size: int) -> list[str]:
    """One rank freezes the norm that it holds, as by a loop over modules that have parameters here."""
    x, y = here(make_data(8))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, CLASSES))
    engine = make(model=model)
    told = [said(step, engine, x, y)]
    for module in engine.model:
        if any(param is not None for param in module._parameters.values()) and isinstance(module, nn.BatchNorm1d):
            module.eval()
    told += [said(step, engine, x, y) for _ in range(2)]
    return told


def test_a_mode_that_one_rank_changes():
    for told in run_ranks(changes_modes, 2):
        assert told == ["nothing"] * 3
