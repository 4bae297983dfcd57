"""The cells of the table: a model in a layout, trained as a user would, and plain torch in one process beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

import halfmesh
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.composition.parity import MOVEMENT, STILL
from tests.composition.training import digest
from tests.support.models import COMPUTE_DTYPES, MODES, TOLERANCES
from tests.support.ranks import find_obstacle, rank_device, run_ranks

from .zoo import SAMPLES, SUBJECTS, UPDATES, Batch, Subject


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
        if obstacle := find_obstacle(self.world, sends=self.pipeline > 1):
            pytest.skip(obstacle)
        return run_ranks(job, self.world, *args)

    @property
    def microbatches(self) -> int:
        return 2 if self.pipeline > 1 else 1

    def refusal(self, subject: Subject) -> str | None:
        """What the message says that `subject` is refused with here; None where it trains."""
        found = [subject.refused.get(axis) for axis in ("tensor", "pipeline") if getattr(self, axis) > 1]
        return next(filter(None, found), None)

    def config(self, subject: Subject) -> dict[str, Any]:
        parallel: dict[str, Any] = {"data": self.strategy}
        if self.tensor > 1:
            parallel["tensor"] = self.tensor
        if self.pipeline > 1:
            partition = {"partition": subject.points} if subject.points else {}
            parallel["pipeline"] = {"size": self.pipeline, "microbatches": self.microbatches, **partition}
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
    def refusal(self) -> str | None:
        return LAYOUTS[self.layout].refusal(SUBJECTS[self.model])

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.mode}"


class Samples(Dataset[Batch]):
    def __init__(self, data: Batch) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data["labels"])

    def __getitem__(self, index: int) -> Batch:
        return {name: value[index] for name, value in self._data.items()}


@dataclass(frozen=True)
class Outcome:
    """What a rank saw: a refusal, or losses and weights (these from rank 0 only)."""

    refusal: str = ""
    losses: tuple[float, ...] = ()
    digest: str = ""
    weights: dict[str, torch.Tensor] | None = None


def make_optimizer(params: Any, lr: float) -> optim.Optimizer:
    return optim.SGD(params, lr=lr, momentum=0.9)


def call(model: Any, batch: Batch) -> Any:
    """As each model is called: images by position, words by name."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model(inputs.pop("x")) if "x" in inputs else model(**inputs)


def train(rank: int, world_size: int, cell: Cell) -> Outcome:
    """Each rank begins with other weights; rank 0's count."""
    subject, layout = SUBJECTS[cell.model], LAYOUTS[cell.layout]
    model = subject.make(seed=rank)
    before = digest(model.state_dict())
    optimizer = make_optimizer(model.parameters(), subject.lr)
    loader = DataLoader(Samples(subject.data()), SAMPLES // layout.data)
    own_loss = subject.own_loss and layout.pipeline == 1
    criterion = None if own_loss else subject.criterion
    config = MODES[cell.mode] | layout.config(subject)
    try:
        engine = halfmesh.initialize(model, optimizer, criterion, loader, config, device=rank_device())
    except (InputError, IncompatibleConfigError) as error:
        assert digest(model.state_dict()) == before, "the refusal has changed the model"
        return Outcome(refusal=str(error))
    losses = []
    for batch in engine.dataloader:
        engine.zero_grad()
        if own_loss:
            loss = engine(**batch).loss
        else:
            loss = engine.criterion(call(engine, batch), batch["labels"])
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
    engine.close(restore=True)
    weights = {name: value.detach().clone() for name, value in engine.model.state_dict().items()}
    return Outcome("", tuple(losses), digest(weights), weights if rank == 0 else None)


@dataclass(frozen=True)
class Reference:
    model: nn.Module
    start: dict[str, torch.Tensor]
    losses: tuple[float, ...]


@cache
def reference(name: str, data: int, microbatches: int) -> Reference:
    """Plain torch in fp32. A batch is computed at once, or, with BatchNorm, in the parts that the layout makes."""
    subject = SUBJECTS[name]
    model = subject.make()
    start = {n: value.clone() for n, value in model.state_dict().items()}
    optimizer = make_optimizer(model.parameters(), subject.lr)
    samples = subject.data()
    losses = []
    for update in range(UPDATES):
        batch = {n: v[update * SAMPLES : (update + 1) * SAMPLES] for n, v in samples.items()}
        parts = list(_parts(batch, data, microbatches)) if subject.batch_norm else [batch]
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            loss = subject.criterion(call(model, part), part["labels"]) / len(parts)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return Reference(model, start, tuple(losses))


def _parts(batch: Batch, data: int, microbatches: int) -> Iterator[Batch]:
    """Samples are dealt out to the data ranks in turn, and a rank's are split into microbatches."""
    for rank in range(data):
        mine = {n: v[rank::data] for n, v in batch.items()}
        for index in range(microbatches):
            yield {n: v.chunk(microbatches)[index] for n, v in mine.items()}


def all_cells() -> Iterator[Cell]:
    """Each model in each layout in fp32, and some in half precision."""
    yield from (Cell(model, layout) for model in SUBJECTS for layout in LAYOUTS)
    yield from (Cell(model, layout, mode) for model, subject in SUBJECTS.items() for mode, layout in subject.half)


def find_problems(cell: Cell, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Everything that is wrong with what the ranks of `cell` did."""
    first = outcomes[0]
    if cell.refusal is not None or first.refusal:
        if not all(outcome.refusal and (cell.refusal or "nothing") in outcome.refusal for outcome in outcomes):
            yield f"said {[outcome.refusal for outcome in outcomes]}, and not {cell.refusal!r}"
        return
    layout = LAYOUTS[cell.layout]
    expected = reference(cell.model, layout.data, layout.microbatches)
    if any(outcome.digest != first.digest for outcome in outcomes):
        yield "ranks end with different weights"
    assert first.weights is not None
    whole = expected.model.state_dict()
    if {n: (v.shape, v.dtype) for n, v in first.weights.items()} != {n: (v.shape, v.dtype) for n, v in whole.items()}:
        yield "the model is not given back as it came"
        return
    weights, movement = differences(first.weights, expected)
    if not weights <= TOLERANCES[cell.mode]:
        yield f"a weight differs from one process's by {weights:.1e}, relative to the largest"
    if not movement <= MOVEMENT[COMPUTE_DTYPES[cell.mode]]:
        yield f"a parameter moved otherwise than in one process, by {movement:.1e} of its way"
    losses = torch.tensor([outcome.losses for outcome in outcomes]).mean(0)
    apart = (losses / torch.tensor(expected.losses) - 1).abs().max().item()
    if not apart <= 10 * TOLERANCES[cell.mode]:
        yield f"a loss differs from one process's by {apart:.1e} of it"


def differences(weights: dict[str, torch.Tensor], expected: Reference) -> tuple[float, float]:
    """The largest difference of a parameter, relative to the largest; and of a parameter's way, relative to it."""
    params = {name: param.detach() for name, param in expected.model.named_parameters()}
    largest = max(param.abs().max().item() for param in params.values())
    apart = max((weights[name] - param).abs().max().item() for name, param in params.items()) / largest
    ways = {name: (param - expected.start[name]).norm().item() for name, param in params.items()}
    moved = [name for name, way in ways.items() if way > STILL * params[name].numel() ** 0.5]
    return apart, max((weights[name] - params[name]).norm().item() / ways[name] for name in moved)
