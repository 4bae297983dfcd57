"""The schedules: the order in which a rank runs the forwards and backwards of its microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)


class Schedule(Protocol):
    """A schedule, as registered in SCHEDULES.

    Attributes:
        splits_backward: it runs the gradients of a stage's inputs and those of its weights as two passes.
    """

    splits_backward: bool

    def rank_of(self, stage: int, size: int) -> int:
        """The rank, of `size`, that has a stage."""
        ...

    def find_problems(self, size: int, chunks: int, microbatches: int | None) -> Iterator[tuple[str, str]]:
        """The keys ("microbatches", "chunks") that do not fit and why, for `size` ranks with `chunks` stages each."""
        ...

    def make(self, stages: Sequence[PipelineStage], microbatches: int) -> Any:
        """A schedule of torch over this rank's stages. The last stage returns the loss, ready for backward."""
        ...

    def bubble(self, size: int, chunks: int, microbatches: int) -> float:
        """The fraction of a step that a rank waits, if all stages take equally long and sending takes no time."""
        ...


def _loss(output: Any, target: Any) -> Any:
    return (output[0] if isinstance(output, tuple) else output).sum()  # of one element; no view, which torch detaches


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule of torch.

    Args:
        name: its name in SCHEDULES.
        kind: torch's class.
        fills: it needs as many microbatches as ranks, or more.
        interleaves: each rank runs several stages in turn.
        splits_backward: see `Schedule`.
        is_v: each rank has two stages: the second ones lie in the opposite order, so rank 0 has the first and the last.
        waits: the time in a step that a rank waits for each other rank; 1 is a forward and backward of one stage.
    """

    name: str
    kind: Any
    fills: bool = False
    interleaves: bool = False
    splits_backward: bool = False
    is_v: bool = False
    waits: float = 1.0

    def rank_of(self, stage: int, size: int) -> int:
        return 2 * size - 1 - stage if self.is_v and stage >= size else stage % size

    def find_problems(self, size: int, chunks: int, microbatches: int | None) -> Iterator[tuple[str, str]]:
        stages = size * chunks if self.is_v else size
        if microbatches is not None and self.fills and microbatches < stages:
            few = f"{microbatches} is fewer than the {stages} stages, which schedule={self.name!r} has to fill"
            yield "microbatches", f"{few}; use {stages} or more, or schedule='gpipe'"
        if microbatches is not None and self.interleaves and not self.is_v and microbatches % size:
            odd = f"{microbatches} is not a multiple of the {size} ranks, which schedule={self.name!r} needs"
            yield "microbatches", f"{odd}; use a multiple, or another schedule"
        if self.is_v and chunks != 2:
            yield "chunks", f"schedule={self.name!r} has two chunks per rank, not {chunks}; use chunks=2"
        elif self.interleaves and chunks < 2:
            yield "chunks", f"{chunks} chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'"
        if not self.interleaves and chunks > 1:
            many = f"{chunks} chunks per rank need schedule='interleaved'"
            yield "chunks", f"{many}; schedule={self.name!r} has one"

    def make(self, stages: Sequence[PipelineStage], microbatches: int) -> Any:
        given = list(stages) if self.interleaves else stages[0]
        return self.kind(given, microbatches, loss_fn=_loss, scale_grads=False)

    def bubble(self, size: int, chunks: int, microbatches: int) -> float:
        """w (p - 1) / (v m + w (p - 1)) with v chunks.

        w is 1 as in GPipe, https://arxiv.org/abs/1811.06965 section 2.3, and Megatron-LM,
        https://arxiv.org/abs/2104.04473 section 2.2. If forward and both parts of backward take equal time, it is
        1/3 for ZB1P, https://arxiv.org/abs/2401.10241, 0 for ZB-V, https://arxiv.org/abs/2405.15362, and 2/3 for
        DualPipeV, https://github.com/deepseek-ai/DualPipe.
        """
        waits = self.waits * (size - 1)
        return waits / (chunks * microbatches + waits)


GPIPE = TorchSchedule("gpipe", ScheduleGPipe)
ONE_F_ONE_B = TorchSchedule("1f1b", Schedule1F1B, fills=True)
INTERLEAVED = TorchSchedule("interleaved", ScheduleInterleaved1F1B, interleaves=True)
ZERO_BUBBLE = TorchSchedule(
    "zero_bubble", ScheduleInterleavedZeroBubble, interleaves=True, splits_backward=True, waits=1 / 3
)
ZBV = TorchSchedule("zbv", ScheduleZBVZeroBubble, interleaves=True, splits_backward=True, is_v=True, waits=0)
DUALPIPEV = TorchSchedule(
    "dualpipev", ScheduleDualPipeV, fills=True, interleaves=True, splits_backward=True, is_v=True, waits=2 / 3
)
