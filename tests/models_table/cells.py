"""The cells of the table: a model in a layout, as a user would train it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import optim

import halfmesh
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.composition.training import digest
from tests.support.models import MODES
from tests.support.ranks import find_obstacle, rank_device, run_ranks

from .zoo import SUBJECTS, Subject


@dataclass(frozen=True)
class Layout:
    """A column."""

    words: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    strategy: str = "replicate"

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline

    def run(self, job: Any, *args: Any) -> Any:
        """What `job` returns on the ranks of this layout, where it can run."""
        self.skip_obstacles()
        return run_ranks(job, self.world, *args)

    def skip_obstacles(self) -> None:
        """Skip the test where it cannot run."""
        if obstacle := find_obstacle(self.world, sends=self.pipeline > 1):
            pytest.skip(obstacle)

    def rejection(self, subject: Subject) -> str | None:
        """What the message says that `subject` is rejected with here; None where it trains."""
        found = [subject.rejected.get(axis) for axis in ("tensor", "pipeline") if getattr(self, axis) > 1]
        return next(filter(None, found), None)

    def config(self, subject: Subject) -> dict[str, Any]:
        parallel: dict[str, Any] = {"data": self.strategy}
        if self.tensor > 1:
            parallel["tensor"] = self.tensor
        if self.pipeline > 1:
            partition = {"partition": subject.points} if subject.points else {}
            parallel["pipeline"] = {"size": self.pipeline, "microbatches": 2, **partition}
        return {"parallel": parallel}


LAYOUTS = {
    "one": Layout("one process"),
    "data": Layout("data 2", data=2),
    "zero1": Layout("zero1 2", data=2, strategy="zero1"),
    "fsdp": Layout("fsdp 2", data=2, strategy="fsdp"),
    "tensor": Layout("tensor 2", tensor=2),
    "pipeline": Layout("pipeline 2", pipeline=2),
    "fsdp x tensor": Layout("fsdp 2 x tensor 2", data=2, tensor=2, strategy="fsdp"),
    "all": Layout("zero1 2 x tensor 2 x pipeline 2", data=2, tensor=2, pipeline=2, strategy="zero1"),
}


@dataclass(frozen=True)
class Cell:
    model: str
    layout: str
    mode: str = "none"

    @property
    def rejection(self) -> str | None:
        return LAYOUTS[self.layout].rejection(SUBJECTS[self.model])

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.mode}"


def build(name: str, with_criterion: bool) -> Any:
    """What `halfmesh verify` is given: a model as its users call it; most compute their own loss."""
    subject = SUBJECTS[name]
    batch = subject.data()
    if not with_criterion:
        return subject.build(), batch
    labels = batch.pop("labels")
    return subject.build(), (batch.get("x", batch), labels), subject.criterion


def rejection(rank: int, world_size: int, cell: Cell) -> str:
    """What is said to `cell`, whose model stays as it was."""
    subject = SUBJECTS[cell.model]
    model = subject.make(seed=rank)
    before = digest(model.state_dict())
    config = MODES[cell.mode] | LAYOUTS[cell.layout].config(subject)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((InputError, IncompatibleConfigError)) as caught:
        halfmesh.initialize(model, sgd, subject.criterion, config=config, device=rank_device())
    assert digest(model.state_dict()) == before
    return str(caught.value)


def all_cells() -> Iterator[Cell]:
    """Each model in each layout in fp32, and some in half precision."""
    yield from (Cell(model, layout) for model in SUBJECTS for layout in LAYOUTS)
    for model, subject in SUBJECTS.items():
        if subject.half is not None:
            yield Cell(model, subject.half[1], subject.half[0])
