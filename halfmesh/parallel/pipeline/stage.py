"""One stage as a module that torch's schedules call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from .boundary import Crossing, enter, leave, tie, widen
from .pieces import Call, Piece

Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Surroundings:
    """What a stage's forward runs in.

    Attributes:
        scope: around the forward, as autocast.
        random: around each forward, so that it draws the model's own random numbers.
        dtype: what half precision becomes where it leaves a stage; None: it stays.
        host_random: around a batch, for what it draws from python's and numpy's generators. (Changing those costs more
            than the forward of a small stage.)
        saving: around each forward, for what autograd saves of it.
    """

    scope: Scope
    random: Scope
    dtype: torch.dtype | None = None
    host_random: Scope = nullcontext
    saving: Scope = nullcontext


@dataclass
class Batch:
    """The microbatches of one batch on their way through the stages of this rank.

    Attributes:
        calls: one for each microbatch.
        finish: called as finish(output, index) on the last stage; returns what backward begins with (0-dim).
        crossings: what each stage returns.
    """

    calls: Sequence[Call]
    finish: Callable[[Any, int], torch.Tensor]
    crossings: Sequence[Crossing] = field(repr=False)


class StageModule(nn.Module):
    """Stage `index` of `count`. The model's modules are not registered: they belong to the user's model.

    Called by torch with what the stage before sent, and with the number of the microbatch.
    """

    def __init__(
        self, model: nn.Module, pieces: Sequence[Piece], index: int, count: int, surroundings: Surroundings
    ) -> None:
        super().__init__()
        self._model = (model,)  # a tuple hides it from nn.Module
        self.pieces = tuple(pieces)
        self.index = index
        self.is_last = index == count - 1
        self._surroundings = surroundings
        self.batch: Batch | None = None

    def compute(self, call: Call, carry: Any) -> Any:
        """The stage's forward: what leaves it, or the model's output."""
        call = call.afresh()
        around = self._surroundings
        with around.random(), around.scope(), around.saving():
            for piece in self.pieces:
                carry = piece.run(self._model[0], call, carry)
        return carry if self.is_last else widen(carry, around.dtype)

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, number = self.batch, int(index)  # on the CPU: no device is waited for
        assert batch is not None
        carry, anchors = enter(received, batch.crossings[self.index - 1]) if received else (None, [])
        carry = self.compute(batch.calls[number], carry)
        if self.is_last:
            # As float64 it can carry any loss without rounding what flows back.
            with self._surroundings.random():  # the criterion runs here only, and may draw, too
                loss = batch.finish(carry, number)
            return tie([loss.double().reshape(1)], anchors)
        return tie(leave(carry, batch.crossings[self.index]), anchors)


def make_stage(
    module: StageModule, crossings: Sequence[Crossing], device: torch.device, group: Any, last: Callable[[], None]
) -> PipelineStage:
    """torch's stage around `module`, with all that it would find out by sending told beforehand.

    Args:
        last: called before the last backward of a step.
    """
    received = crossings[module.index - 1].on_the_wire() if module.index else ()
    sent = crossings[module.index].on_the_wire()
    if module.is_last:
        sent = (torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True),)
    stage = _Stage(module, module.index, len(crossings), device, input_args=received, output_args=sent, group=group)
    stage.last = last
    return stage


class _Stage(PipelineStage):
    """Says when its last backward of a step begins, so that gradients can be reduced while it runs."""

    last: Callable[[], None]

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if last_backward:
            self.last()
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
