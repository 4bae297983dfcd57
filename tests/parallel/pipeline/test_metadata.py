"""Each rank finds the shapes of its own stages only, and tells them the others; the oldest ones are forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.parallel.pipeline import runner
from tests.support.models import CLASSES, FEATURES, difference, make_data, said, sgd
from tests.support.pipeline_parts import make, pipe, step, whole
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

MARK = object()


class Gives(nn.Linear):
    """Passes on an object that is compared by `is`, or one whose class other ranks cannot find."""

    def __init__(self, local: bool) -> None:
        super().__init__(FEATURES, FEATURES)
        self.local = local

    def forward(self, x: torch.Tensor) -> Any:
        @dataclass
        class Local:
            y: torch.Tensor

        return Local(super().forward(x)) if self.local else (super().forward(x), MARK)


class Takes(nn.Linear):
    def forward(self, given: Any) -> torch.Tensor:
        y, mark = (given.y, MARK) if hasattr(given, "y") else given
        return super().forward(y if mark is MARK else y * 2)


def passing(local: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Gives(local), Takes(FEATURES, CLASSES))


def of_objects(rank: int, world_size: int) -> list[Any]:
    found = []
    for local in (True, False):
        engine = make(model=passing(local))
        step(engine, *make_data(8))
        found.append(whole(engine))
    return found


def test_objects_that_cannot_be_sent_cross_as_before():
    for found in run_ranks(of_objects, 2):
        for weights, local in zip(found, (True, False), strict=True):
            model, (x, y) = passing(local), make_data(8)
            nn.functional.cross_entropy(model(x), y).backward()
            sgd(model.parameters()).step()
            assert difference(weights, model) < 1e-6


# -- modes that one rank changes -------------------------------------------------------------------------------------


class Wider(nn.Module):
    """Returns more in training mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], 1)[:, : 16 if self.training else FEATURES]


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


def other_outputs(rank: int, world_size: int) -> str:
    engine = make(pipe(partition=("2",)), nn.Sequential(nn.Linear(FEATURES, 16), Wider(), nn.Linear(16, CLASSES)))
    step(engine, *make_data(8))
    engine.model[1].eval()
    return said(engine, here(make_data(8)[0])) if rank == 0 else "not asked"


def test_a_mode_that_one_rank_changes():
    for told in run_ranks(changes_modes, 2):
        assert told == ["nothing"] * 3
    first, _ = run_ranks(other_outputs, 2)
    assert "stage 0 of the pipeline returns other shapes, dtypes or values than before" in first
