"""What a model is, and how it can be divided: found once, before any layout is looked at."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..compilation import find_blocks
from ..config.load import load_config
from ..division_plans import Plans, make_plans
from ..errors import ConfigError, HalfmeshError, InputError
from . import subject
from .candidates import CHECKPOINTS, CHUNKS, STRATEGIES
from .tracker import Tracker, dry_run_mode

_REASON = 200
"""Characters of a note: a reason may list all modules of a model."""


@dataclass(frozen=True)
class Stage:
    """A stage's elements of parameters, and its part of the model's blocks."""

    numel: float
    blocks: float


@dataclass
class ModelFacts:
    """Attributes:
    numel: elements of the parameters.
    largest: of the largest of them.
    block: of the largest repeated block.
    root: of what is in no block.
    rows: of the batch that the model comes with; 0 if there is none.
    stages: by number of stages, where the model can be cut into so many.
    tensor_sizes, pipeline_sizes, strategies, checkpoints: what the model allows, of what was asked for.
    notes: why not the others.
    """

    numel: int
    largest: int
    block: int
    root: int
    rows: int
    stages: dict[int, tuple[Stage, ...]]
    tensor_sizes: list[int] = field(default_factory=lambda: [1])
    pipeline_sizes: list[int] = field(default_factory=lambda: [1])
    strategies: list[str] = field(default_factory=lambda: ["replicate"])
    checkpoints: list[str] = field(default_factory=lambda: ["off"])
    notes: list[str] = field(default_factory=list)


def find_facts(reference: str, batch: Sequence[str], tensors: Sequence[int], pipelines: Sequence[int]) -> ModelFacts:
    """Look at the model that `reference` builds (see `subject.make`), with these sizes of the axes.

    Raises:
        InputError: it cannot be built, or has no parameters.
    """
    with dry_run_mode(), Tracker():
        given = subject.make(reference, batch)
        model = given.model
        sizes = [param.numel() for param in model.parameters()]
        if not sizes:
            raise InputError(
                f"--model {reference}: {type(model).__name__} has no parameters, so there is nothing to train; let it "
                "return a model with weights"
            )
        blocks = [
            sum(p.numel() for p in model.get_submodule(n).parameters()) for n in dict.fromkeys(find_blocks(model))
        ]
        facts = ModelFacts(
            sum(sizes), max(sizes), max(blocks, default=0), max(0, sum(sizes) - sum(blocks)), given.rows, {}
        )
        facts.stages[1] = (Stage(float(facts.numel), 1.0),)
        trial = _Trial(model, facts)
        facts.tensor_sizes = trial.sizes("tensor", tensors)
        facts.pipeline_sizes = trial.sizes("pipeline", pipelines)
        for chunks in CHUNKS:
            for size in facts.pipeline_sizes:
                if size > 1:
                    trial.cut(size, chunks)
        facts.strategies += [s for s in STRATEGIES[1:] if trial.allows({"parallel": {"data": s}}, f"data={s!r}")]
        if trial.allows({"activation_checkpoint": "full"}, "activation_checkpoint"):
            facts.checkpoints = list(CHECKPOINTS)
    return facts


class _Trial:
    """Plans of one model, of which nothing is carried out."""

    def __init__(self, model: nn.Module, facts: ModelFacts) -> None:
        self._model = model
        self._facts = facts

    def sizes(self, axis: str, wanted: Sequence[int]) -> list[int]:
        """Those of an axis that the model allows; the facts say why not the others."""
        refused: dict[int, str] = {}
        for size in wanted:
            problem = self._tensor(size) if axis == "tensor" else self.cut(size, 1)
            if size > 1 and problem is not None:
                refused[size] = problem
        allowed = [size for size in wanted if size not in refused]
        if refused and allowed == [1]:
            self._facts.notes.append(f"{axis} stays 1: {next(iter(refused.values()))}")
        elif refused:
            which = ", ".join(map(str, refused))
            self._facts.notes.append(f"{axis}={which} is left out: {next(iter(refused.values()))}")
        return allowed

    def allows(self, config: dict[str, Any], what: str) -> bool:
        """Whether two data ranks could run it; the facts say why not."""
        made = self._plan(config, 2)
        if isinstance(made, str):
            self._facts.notes.append(f"{what} is left out: {made}")
        return not isinstance(made, str)

    def _tensor(self, size: int) -> str | None:
        made = self._plan({"parallel": {"tensor": size}}, size)
        return made if isinstance(made, str) else None

    def cut(self, size: int, chunks: int) -> str | None:
        """Note the stages of such a pipeline, or say why it cannot be."""
        keys = {"size": size, "microbatches": size, "chunks": chunks}
        made = self._plan({"parallel": {"pipeline": keys | ({"schedule": "interleaved"} if chunks > 1 else {})}}, size)
        if isinstance(made, str):
            return made
        if made.partition is not None:
            stages = made.partition.stages
            counts = [sum(_is_block(piece.name) for piece in stage) for stage in stages]
            total = sum(counts) or 1
            self._facts.stages[size * chunks] = tuple(
                Stage(cost, count / total) for cost, count in zip(made.partition.costs, counts, strict=True)
            )
        return None

    def _plan(self, config: dict[str, Any], ranks: int) -> Plans | str:
        optimizer = torch.optim.AdamW(self._model.parameters())
        try:
            return make_plans(self._model, optimizer, None, None, load_config(config), ranks)
        except ConfigError as error:
            reason = error.problems[0]
        except (HalfmeshError, ValueError) as error:
            reason = str(error)
        return textwrap.shorten(reason.splitlines()[0], _REASON, placeholder=" ...")


def _is_block(name: str) -> bool:
    """Whether a piece is one of several alike, which have a number."""
    return any(part.isdigit() for part in name.split("."))
