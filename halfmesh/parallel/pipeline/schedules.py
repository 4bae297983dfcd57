"""The schedules: in which order a rank runs the forwards and backwards of its microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B


class Schedule(Protocol):
    """What is registered in SCHEDULES."""

    def find_problems(self, size: int, chunks: int, microbatches: int | None) -> Iterator[tuple[str, str]]:
        """The keys ("microbatches", "chunks") that do not fit and why, for `size` ranks with `chunks` stages each."""
        ...

    def make(self, stages: Sequence[PipelineStage], microbatches: int) -> Any:
        """One of torch's schedules over this rank's stages, whose last stage returns the loss, ready for backward."""
        ...

    def bubble(self, size: int, chunks: int, microbatches: int) -> float:
        """The part of a step in which a rank waits, if all forwards take alike, all backwards, and sending nothing."""
        ...


def _loss(output: Any, target: Any) -> Any:
    """The last stage has computed it already."""
    return (output[0] if isinstance(output, tuple) else output).squeeze()


@dataclass(frozen=True)
class SingleStage:
    """A schedule with one stage on each rank.

    Args:
        name: what it is registered as.
        kind: torch's class.
        fills: whether there have to be as many microbatches as stages.
    """

    name: str
    kind: Any
    fills: bool

    def find_problems(self, size: int, chunks: int, microbatches: int | None) -> Iterator[tuple[str, str]]:
        if microbatches is not None and self.fills and microbatches < size:
            few = f"{microbatches} is fewer than the {size} stages, which schedule='1f1b' has to fill"
            yield "microbatches", f"{few}; use {size} or more, or schedule='gpipe'"
        if chunks > 1:
            yield (
                "chunks",
                f"{chunks} chunks per rank need schedule='interleaved'; schedule={self.name!r} has one",
            )

    def make(self, stages: Sequence[PipelineStage], microbatches: int) -> Any:
        return self.kind(stages[0], microbatches, loss_fn=_loss, scale_grads=False)

    def bubble(self, size: int, chunks: int, microbatches: int) -> float:
        """(p - 1) / (m + p - 1), as in GPipe, https://arxiv.org/abs/1811.06965 section 2.3."""
        return (size - 1) / (microbatches + size - 1)


@dataclass(frozen=True)
class Interleaved:
    """Several stages on each rank, in turn."""

    def find_problems(self, size: int, chunks: int, microbatches: int | None) -> Iterator[tuple[str, str]]:
        if microbatches is not None and microbatches % size:
            below = microbatches // size * size
            near = f"{below} or {below + size}" if below else str(size)
            odd = f"{microbatches} is not a multiple of the {size} stages, which schedule='interleaved' needs"
            yield "microbatches", f"{odd}; use {near}"
        if chunks < 2:
            yield "chunks", f"{chunks} chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'"

    def make(self, stages: Sequence[PipelineStage], microbatches: int) -> Any:
        return ScheduleInterleaved1F1B(list(stages), microbatches, loss_fn=_loss, scale_grads=False)

    def bubble(self, size: int, chunks: int, microbatches: int) -> float:
        """(p - 1) / (v m + p - 1) with v chunks, as in https://arxiv.org/abs/2104.04473 section 2.2."""
        return (size - 1) / (chunks * microbatches + size - 1)


GPIPE = SingleStage("gpipe", ScheduleGPipe, fills=False)
ONE_F_ONE_B = SingleStage("1f1b", Schedule1F1B, fills=True)
INTERLEAVED = Interleaved()
