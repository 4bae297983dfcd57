"""Splits a batch into microbatches, and defines schedules: the order in which a rank runs forwards and backwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed import pipelining

from ...errors import InputError
from ...utils.tensors import map_tensors, position_names, tensors_of
from ...utils.torch_private import versions
from .partition import Call


class SplitCall:
    """A call of a function that can be split along the batch, which is dim 0 of each tensor.

    Args:
        names: the `parameter_names` of the function.
        non_split: names of arguments without a batch dim, which every microbatch gets unsplit.
        name: the function's name in messages.

    Attributes:
        tensors: the tensors in the arguments.
        rows: the number of rows of the first tensor that is split, or 0.
    """

    def __init__(self, names: Sequence[str], call: Call, non_split: Collection[str], name: str) -> None:
        self._call, self._non_split, self._name = call, non_split, name
        self._values = [*zip(position_names(names, len(call.args)), call.args, strict=True), *call.kwargs.items()]
        self._named = [(name, tensor) for name, value in self._values for tensor in tensors_of(value)]
        self.tensors = [tensor for _, tensor in self._named]
        self.rows: int = next((t.shape[0] for name, t in self._named if name not in non_split and t.dim()), 0)
        self._versions = versions(self.tensors)

    def was_changed(self) -> bool:
        """Return True if a tensor was written in place since."""
        return versions(self.tensors) != self._versions

    def split(self, sizes: Sequence[int]) -> list[Call]:
        """The call as several calls, with these numbers of its rows.

        Raises:
            InputError: a tensor has another number of rows, or something that is not a tensor has an item per row.
        """
        rows, count = sum(sizes), len(sizes)
        for name, value in self._values if count > 1 else ():
            if name not in self._non_split and _has_items_of_rows(value, rows):
                raise InputError(
                    f"{self._name}: {name} has {rows} items, one for each row of the batch, but only tensors are split "
                    "into microbatches; pass a padded tensor. If it is the same for all samples, name it in "
                    f"parallel.pipeline.non_split=({name!r},)"
                )
        chunks = [self._chunks(name, tensor, sizes) for name, tensor in self._named]
        tree = self._call.args, dict(self._call.kwargs)
        each = zip(*chunks, strict=True) if chunks else [()] * count

        def with_tensors(tensors: Sequence[torch.Tensor]) -> Call:
            following = iter(tensors)
            return Call(*map_tensors(lambda _: next(following), tree))

        return list(map(with_tensors, each))

    def first(self, count: int) -> Call:
        """The call with the first `count` of its rows."""
        return self.split([count, self.rows - count])[0] if count < self.rows else self._call

    def _chunks(self, name: str, tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        if name in self._non_split or tensor.dim() == 0:
            return [tensor] * len(sizes)
        if tensor.shape[0] != sum(sizes):
            raise InputError(
                f"{self._name}: {name} has {tensor.shape[0]} rows, and the batch has {sum(sizes)}; arguments are split "
                f"along their first dim. Name those without a batch dim in parallel.pipeline.non_split=({name!r},)"
            )
        return tensor.split(list(sizes))


def _has_items_of_rows(tree: Any, rows: int) -> bool:
    """Return True if `tree` holds a list or array with an item for each row: names of samples, boxes of each image."""
    if isinstance(tree, np.ndarray):
        return tree.ndim > 0 and len(tree) == rows
    if not isinstance(tree, (list, tuple, dict)):
        return False
    items = list(tree.values()) if isinstance(tree, dict) else tree
    is_list = not isinstance(tree, dict) and not hasattr(tree, "_fields") and len(items) == rows
    has_rows = any(isinstance(item, torch.Tensor) and rows in item.shape[:1] for item in items)  # which are split
    return (is_list and not has_rows) or any(_has_items_of_rows(item, rows) for item in items)


def forward_order(ranks: Sequence[int], count: int) -> Iterator[list[tuple[int, int]]]:
    """The order of `count` forwards through all stages, without a backward, as ticks in which ranks compute at once.

    A tick is the stages that compute in it, each with the number of its next microbatch: for each rank the last stage
    that has an input.

    Args:
        ranks: the rank of each stage.
    """
    done = [0] * len(ranks)
    while done[-1] < count:
        ready = (stage for stage in range(len(ranks)) if done[stage] < (done[stage - 1] if stage else count))
        tick = sorted({ranks[stage]: stage for stage in ready}.values())
        yield [(stage, done[stage]) for stage in tick]
        for stage in tick:
            done[stage] += 1


def _loss(output: Any, target: Any) -> Any:
    return (output[0] if isinstance(output, tuple) else output).sum()  # of one element; no view, which torch detaches


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule of torch, as registered in SCHEDULES. Any object with these methods can be registered.

    Args:
        name: its name in SCHEDULES.
        kind: torch's class.
        fills: it needs as many microbatches as ranks, or more.
        interleaves: each rank runs several stages in turn.
        splits_backward: it runs the gradients of a stage's inputs and those of its weights as two passes.
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
        """The rank, of `size`, that has a stage."""
        return 2 * size - 1 - stage if self.is_v and stage >= size else stage % size

    def find_problems(self, size: int, chunks: int, microbatches: int | None) -> Iterator[tuple[str, str]]:
        """The keys ("microbatches", "chunks") that do not fit and why, for `size` ranks with `chunks` stages each."""
        stages = size * chunks if self.is_v else size
        if microbatches is not None and self.fills and microbatches < stages:
            yield "microbatches", f"{microbatches} is fewer than the {stages} stages; use more, or schedule='gpipe'"
        if microbatches is not None and self.interleaves and not self.is_v and microbatches % size:
            yield "microbatches", f"{microbatches} is not a multiple of the {size} ranks, as {self.name!r} needs"
        if self.is_v and chunks != 2:
            yield "chunks", f"schedule={self.name!r} has two chunks per rank, not {chunks}; use chunks=2"
        elif self.interleaves and chunks < 2:
            yield "chunks", f"{chunks} chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'"
        if not self.interleaves and chunks > 1:
            yield "chunks", f"{chunks} chunks per rank need schedule='interleaved'; schedule={self.name!r} has one"

    def make(self, stages: Sequence[pipelining.PipelineStage], microbatches: int) -> Any:
        """A schedule over this rank's stages. The last stage returns the loss, ready for backward."""
        given = list(stages) if self.interleaves else stages[0]
        return self.kind(given, microbatches, loss_fn=_loss, scale_grads=False)

    def bubble(self, size: int, chunks: int, microbatches: int) -> float:
        """The fraction of a step that a rank waits, if all stages take equally long and sending takes no time:
        w (p - 1) / (v m + w (p - 1)) with v chunks.

        w is 1 as in GPipe, https://arxiv.org/abs/1811.06965 section 2.3, and Megatron-LM,
        https://arxiv.org/abs/2104.04473 section 2.2. If forward and both parts of backward take equal time, it is
        1/3 for ZB1P, https://arxiv.org/abs/2401.10241, 0 for ZB-V, https://arxiv.org/abs/2405.15362, and 2/3 for
        DualPipeV, https://github.com/deepseek-ai/DualPipe.
        """
        waits = self.waits * (size - 1)
        return waits / (chunks * microbatches + waits)


GPIPE = TorchSchedule("gpipe", pipelining.ScheduleGPipe)
ONE_F_ONE_B = TorchSchedule("1f1b", pipelining.Schedule1F1B, fills=True)
INTERLEAVED = TorchSchedule("interleaved", pipelining.ScheduleInterleaved1F1B, interleaves=True)
_SPLIT = {"interleaves": True, "splits_backward": True}
ZERO_BUBBLE = TorchSchedule("zero_bubble", pipelining.ScheduleInterleavedZeroBubble, **_SPLIT, waits=1 / 3)
ZBV = TorchSchedule("zbv", pipelining.ScheduleZBVZeroBubble, **_SPLIT, is_v=True, waits=0)
DUALPIPEV = TorchSchedule("dualpipev", pipelining.ScheduleDualPipeV, **_SPLIT, fills=True, is_v=True, waits=2 / 3)
