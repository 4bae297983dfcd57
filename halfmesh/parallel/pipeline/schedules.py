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
        """A schedule of torch over this rank's stages. What the last stage returns is the loss, ready for backward."""
        ...

    def bubble(self, size: int, chunks: int, microbatches: int) -> float:
        """The fraction of a step that a rank waits, if all stages take equally long and sending takes no time."""
        ...


def _loss(output: Any, target: Any) -> Any:
    return (output[0] if isinstance(output, tuple) else output).squeeze()


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule of torch.

    Args:
        name: what it is registered as.
        kind: torch's class.
        fills: it needs as many microbatches as ranks, or more.
        interleaves: each rank runs several stages in turn.
    """

    name: str
    kind: Any
    fills: bool = False
    interleaves: bool = False

    def find_problems(self, size: int, chunks: int, microbatches: int | None) -> Iterator[tuple[str, str]]:
        if microbatches is not None and self.fills and microbatches < size:
            few = f"{microbatches} is fewer than the {size} stages, which schedule={self.name!r} has to fill"
            yield "microbatches", f"{few}; use {size} or more, or schedule='gpipe'"
        if microbatches is not None and self.interleaves and microbatches % size:
            below = microbatches // size * size
            near = f"{below} or {below + size}" if below else str(size)
            odd = f"{microbatches} is not a multiple of the {size} ranks, which schedule={self.name!r} needs"
            yield "microbatches", f"{odd}; use {near}"
        if self.interleaves and chunks < 2:
            yield "chunks", f"{chunks} chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'"
        if not self.interleaves and chunks > 1:
            many = f"{chunks} chunks per rank need schedule='interleaved'"
            yield "chunks", f"{many}; schedule={self.name!r} has one"

    def make(self, stages: Sequence[PipelineStage], microbatches: int) -> Any:
        given = list(stages) if self.interleaves else stages[0]
        return self.kind(given, microbatches, loss_fn=_loss, scale_grads=False)

    def bubble(self, size: int, chunks: int, microbatches: int) -> float:
        """(p - 1) / (v m + p - 1) with v chunks, as in GPipe, https://arxiv.org/abs/1811.06965 section 2.3, and
        Megatron-LM, https://arxiv.org/abs/2104.04473 section 2.2."""
        return (size - 1) / (chunks * microbatches + size - 1)


GPIPE = TorchSchedule("gpipe", ScheduleGPipe)
ONE_F_ONE_B = TorchSchedule("1f1b", Schedule1F1B, fills=True)
INTERLEAVED = TorchSchedule("interleaved", ScheduleInterleaved1F1B, interleaves=True)
