"""What a rank would hold and send, by rule: the one place for estimates. Where they are used they are called so.

AdamW's state is 8 bytes an element; what is summed over data ranks is in fp32, `parallel.data.reduce_dtype`'s default.
The rules are those that dry runs of a Llama followed; tests/plan/test_estimates.py says how closely.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..parallel.registries import SCHEDULES
from .candidates import Candidate

if TYPE_CHECKING:
    from ..amp.recipe import Recipe
    from .model_facts import ModelFacts

_REDUCED = 4
"""Bytes of an element of what is summed over data ranks."""
_ADAM = 8


@dataclass(frozen=True)
class Held:
    """Bytes that a rank has besides activations.

    Attributes:
        always: weights, masters and optimizer state.
        accumulated: gradients that are there while activations are, if an update goes several times through the model.
        at_end: gradients when backward has ended.
        moving: gathered weights and buckets, for a moment, while activations are there.
    """

    always: float
    accumulated: float
    at_end: float
    moving: float

    def peak(self, activations: float, passes: int) -> float:
        """The most at once."""
        kept = self.accumulated if passes > 1 else 0.0
        end = max(self.at_end, kept)
        if self.moving:
            return self.always + max(kept + activations + self.moving, end + self.moving)
        return self.always + max(kept + activations, end)


@dataclass(frozen=True)
class Elements:
    """Of the parameters of one rank under the axes tensor and pipeline: all, of the largest one, and of fsdp's units
    (a block, and what is in none)."""

    all: float
    largest: float
    block: float
    root: float


def hold(elements: Elements, recipe: Recipe, strategy: str, data: int) -> Held:
    """What a rank of `data` ranks holds."""
    number, weight = elements.all, recipe.param_dtype.itemsize if recipe.param_dtype else 4
    master = 4 if recipe.master_weights else 0
    in_flight = 8 * max(25, data) * 2**20  # the defaults of `parallel.data.max_inflight` and `bucket_mb`
    buckets = _REDUCED * elements.largest + min(in_flight, _REDUCED * number)
    if strategy == "fsdp" and data > 1:
        largest = max(elements.root, elements.block)
        units = weight * (elements.root + 2 * elements.block) + (weight + _REDUCED) * largest
        parts = _REDUCED * number / data
        return Held((4 + _ADAM) * number / data, _REDUCED * number, parts, units)
    if strategy == "zero1" and data > 1:
        always = weight * number + (master + _ADAM) * number / data
        return Held(always, weight * number, _REDUCED * number / data + buckets, 0.0)
    always = (weight + master + _ADAM) * number
    if data > 1:
        return Held(always, weight * number, _REDUCED * number, 0.0)
    temporary = min(25 * 2**20, 4 * number) if master else 0.0
    return Held(always, weight * number, weight * number + temporary, 0.0)


@dataclass(frozen=True)
class Profile:
    """What dry runs of one rank, with and without a tensor or a pipeline axis, say of a precision and recomputation.

    Attributes:
        recipe: of the mode.
        fixed: bytes of activations whatever the rows are: autocast's copies of the weights.
        per_row: bytes of activations of a row.
        divided: the part of these that tensor ranks divide.
        outside: the part of these that is of no block, and on the last stage.
        numel_divided: the part of the parameters that tensor ranks divide.
        tensor_row, boundary_row: bytes that a row sends, over tp within the whole model, and from stage to stage.
    """

    recipe: Recipe
    fixed: float
    per_row: float
    divided: float = 0.0
    outside: float = 0.0
    numel_divided: float = 0.0
    tensor_row: float = 0.0
    boundary_row: float = 0.0


@dataclass
class Estimate:
    """Bytes that the largest rank needs, and that a rank sends in an update, at most, by axis."""

    memory: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)


def estimate(candidate: Candidate, profile: Profile, facts: ModelFacts) -> Estimate:
    """The figures of a candidate."""
    found = Estimate()
    for rank in range(candidate.mesh.pipeline):
        memory, sent = _of_stage(candidate, profile, facts, rank)
        found.memory = max(found.memory, memory)
        for axis, size in sent.items():
            found.sent[axis] = max(found.sent.get(axis, 0.0), size)
    return found


def bubble(candidate: Candidate) -> float:
    """The part of a step in which a stage waits."""
    size = candidate.mesh.pipeline
    schedule = SCHEDULES.get(candidate.schedule)
    return 0.0 if size == 1 else schedule.bubble(size, candidate.chunks, candidate.microbatches)


def under_way(candidate: Candidate, rank: int) -> float:
    """Microbatches whose activations a rank of the pipeline holds at once."""
    size, count, chunks = candidate.mesh.pipeline, candidate.microbatches, candidate.chunks
    if size == 1:
        return 1.0
    if chunks > 1:
        return min(count * chunks, 2 * (size - rank - 1) + (chunks - 1) * size + 1) / chunks
    return float(count if candidate.schedule == "gpipe" else min(count, size - rank))


def _of_stage(c: Candidate, profile: Profile, facts: ModelFacts, rank: int) -> tuple[float, dict[str, float]]:
    mesh = c.mesh
    stages = facts.stages[mesh.pipeline * c.chunks]
    own = stages[rank :: mesh.pipeline]
    blocks, numel = sum(stage.blocks for stage in own), sum(stage.numel for stage in own)
    weights = _left(profile.numel_divided, mesh.tensor)
    held = hold(_elements(numel * weights, weights, facts, mesh.pipeline), profile.recipe, c.strategy, mesh.data)
    computed = blocks * (1 - profile.outside) + (profile.outside if rank == mesh.pipeline - 1 else 0.0)
    row = profile.per_row * computed * _left(profile.divided, mesh.tensor)
    fixed = profile.fixed * numel * weights / facts.numel
    activations = under_way(c, rank) * (fixed + row * c.rows / c.microbatches)
    sent = {"dp": data_bytes(numel * weights, profile.recipe, c)}
    if mesh.tensor > 1:
        sent["tp"] = ring(profile.tensor_row * c.rows * c.cycle * computed, mesh.tensor)
    if mesh.pipeline > 1:
        ways = 2 * c.chunks if 0 < rank < mesh.pipeline - 1 else 2 * c.chunks - 1
        sent["pp"] = profile.boundary_row * c.rows * ways
    return held.peak(activations, c.passes), {axis: size for axis, size in sent.items() if size}


def _elements(numel: float, weights: float, facts: ModelFacts, stages: int) -> Elements:
    """Of one rank's parameters. Under a pipeline all modules that a stage calls are units of their own."""
    root = facts.root if stages == 1 else facts.largest
    return Elements(numel, *(weights * size for size in (facts.largest, facts.block, root)))


def _left(divided: float, ranks: int) -> float:
    """What is left on a rank of something of which a part is divided."""
    return 1 - divided + divided / ranks


def data_bytes(numel: float, recipe: Recipe, candidate: Candidate) -> float:
    """Bytes that a rank sends over the data axis in an update; its part of the weights has `numel` elements."""
    weight = recipe.param_dtype.itemsize if recipe.param_dtype else 4
    gathers = {"replicate": _REDUCED, "zero1": weight, "fsdp": 2 * weight * candidate.passes}[candidate.strategy]
    return ring((_REDUCED + gathers) * numel, candidate.mesh.data)


def ring(handed: float, ranks: int) -> float:
    """Bytes that a rank sends for a gather or scatter of so many, which pass all ranks but one; an all-reduce is two of
    these. (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)"""
    return handed * (ranks - 1) / ranks
