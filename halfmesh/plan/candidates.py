"""What `plan` chooses from: layouts, batches, precisions and recomputation that give one update the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import isqrt
from typing import TYPE_CHECKING, Any

from ..compat import get_rows
from ..config.load import load_config
from ..errors import InputError, did_you_mean

if TYPE_CHECKING:
    from ..config import Config
    from .model_facts import ModelFacts

FP32 = "fp32"
DEFAULT_MODES = ("torch-bf16", "naive-bf16", FP32)
CHECKPOINTS = ("off", "selective", "every=2", "full")
"""Values of activation_checkpoint, by how much is computed again."""
STRATEGIES = ("replicate", "zero1", "fsdp")
"""By how much is in parts."""
CHUNKS = (2, 4)
"""Of an interleaved pipeline."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, and how many devices a node has. tp is the fastest axis, then dp."""

    pipeline: int
    data: int
    tensor: int
    node: int

    def crossing(self, axis: str) -> float:
        """The part of what a rank sends over `axis` that leaves its node.

        A ring enters and leaves each node once, so of k ranks of a group in one node each sends 1/k of its bytes to
        another node, on average (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4).
        """
        stride = {"tp": 1, "dp": self.tensor, "pp": self.tensor * self.data}[axis]
        size = {"tp": self.tensor, "dp": self.data, "pp": self.pipeline}[axis]
        if size == 1 or (self.node % (stride * size) == 0):
            return 0.0
        if axis == "pp":  # the stage whose neighbour is in another node
            return 1.0
        return 1 / max(1, min(size, self.node // stride))


@dataclass(frozen=True)
class Candidate:
    """One choice.

    Attributes:
        mode: "fp32", or a mode and its half precision: "naive-bf16".
        microbatches: of the pipeline; 1 without one.
        rows: of a data rank's batch.
        cycle: gradient_accumulation.
        checkpoint: one of CHECKPOINTS.
    """

    mode: str
    mesh: Mesh
    strategy: str
    rows: int
    cycle: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    checkpoint: str = "off"

    @property
    def layout(self) -> tuple[Any, ...]:
        """What it is, apart from how a batch is split."""
        return self.mode, self.mesh, self.strategy, self.checkpoint

    @property
    def passes(self) -> int:
        """How often an update goes through the model."""
        return self.cycle * self.microbatches

    @property
    def config(self) -> Config:
        """The config that says so."""
        keys: dict[str, Any] = {}
        if self.mode != FP32:
            mode, _, key = self.mode.rpartition("-")
            keys[key] = {"mode": mode}
        parallel: dict[str, Any] = {"data": self.strategy}
        if self.mesh.tensor > 1:
            parallel["tensor"] = self.mesh.tensor
        if self.mesh.pipeline > 1:
            parallel["pipeline"] = {
                "size": self.mesh.pipeline,
                "microbatches": self.microbatches,
                "schedule": self.schedule,
                "chunks": self.chunks,
            }
        every = {"every=2": {"every": 2}, "off": False}
        checkpoint = every.get(self.checkpoint, self.checkpoint)
        return load_config(
            keys
            | {"parallel": parallel, "gradient_accumulation": self.cycle}
            | ({"activation_checkpoint": checkpoint} if checkpoint else {})
        )

    def __str__(self) -> str:
        mesh = self.mesh
        sizes = (("pp", mesh.pipeline), ("dp", mesh.data), ("tp", mesh.tensor))
        text = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one rank"
        text += f" {self.strategy}" if mesh.data > 1 else ""
        batch = f"{self.rows} rows"
        if mesh.pipeline > 1:
            schedule = f"{self.schedule} x {self.chunks}" if self.chunks > 1 else self.schedule
            batch += f" in {self.microbatches} microbatches, {schedule}"
        if self.cycle > 1:
            batch += f" x {self.cycle} accumulated"
        checkpoint = "" if self.checkpoint == "off" else f", checkpoint {self.checkpoint}"
        return f"{self.mode}, {text}, {batch}{checkpoint}"


def read_modes(names: Sequence[str]) -> tuple[str, ...]:
    """The modes that a user names, in any case.

    Raises:
        InputError: one is not known; the message lists those that are.
    """
    known = [FP32, *("-".join(filter(None, (row.mode, row.key))) for row in get_rows() if row.mode)]
    for name in names:
        if name.lower() not in known:
            raise InputError(f"--mode {name}: allowed: {', '.join(known)}{did_you_mean(name, known)}")
    return tuple(dict.fromkeys(name.lower() for name in names)) or DEFAULT_MODES


def make_meshes(world_size: int, node: int, facts: ModelFacts) -> list[Mesh]:
    """Those that the model allows. Tensor groups stay within a node."""
    return [
        Mesh(pipeline, world_size // (tensor * pipeline), tensor, node)
        for tensor in facts.tensor_sizes
        for pipeline in facts.pipeline_sizes
        if world_size % (tensor * pipeline) == 0
    ]


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All of them, in order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def refuse_batch(rows: int, meshes: Sequence[Mesh]) -> None:
    """Some mesh has to have data ranks that divide the rows of an update.

    Raises:
        InputError: none has; the message has the nearest numbers that would do.
    """
    sizes = sorted({mesh.data for mesh in meshes})
    if any(rows % size == 0 for size in sizes):
        return
    near = {multiple for size in sizes for multiple in (rows // size * size, (rows // size + 1) * size) if multiple}
    below = max((n for n in near if n < rows), default=None)
    above = min(n for n in near if n > rows)
    raise InputError(
        f"--global-batch {rows}: the rows of an update have to be divided over the data ranks, of which there can be "
        f"{', '.join(map(str, sizes))} here; use {f'{below} or {above}' if below else above}"
    )


def make_candidates(
    mode: str, checkpoint: str, meshes: Sequence[Mesh], rows: int, facts: ModelFacts
) -> Iterator[Candidate]:
    """All ways to take `rows` in an update with this precision and recomputation."""
    for mesh in meshes:
        if rows % mesh.data:
            continue
        own = rows // mesh.data
        for strategy in facts.strategies if mesh.data > 1 else STRATEGIES[:1]:
            if mesh.pipeline == 1:
                for cycle in divisors(own):
                    yield Candidate(mode, mesh, strategy, own // cycle, cycle, checkpoint=checkpoint)
                continue
            for count in divisors(own):
                for schedule, chunks in _schedules(mesh.pipeline, count, facts):
                    yield Candidate(mode, mesh, strategy, own, 1, schedule, chunks, count, checkpoint)


def _schedules(size: int, microbatches: int, facts: ModelFacts) -> Iterator[tuple[str, int]]:
    """Those worth looking at: gpipe waits as long as 1f1b and holds more, but takes fewer microbatches than stages."""
    yield ("1f1b" if microbatches >= size else "gpipe"), 1
    for chunks in CHUNKS if microbatches % size == 0 else ():
        if size * chunks in facts.stages:
            yield "interleaved", chunks
