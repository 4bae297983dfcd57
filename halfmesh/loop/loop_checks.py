"""Warnings of mistakes in the user's loop."""

from __future__ import annotations

from typing import Any

from .._torch import divisor_of
from ..amp.step_result import StepResult
from ..log import get_logger
from ..parallel.replica_checks import are_same
from .parts import EngineHook, EngineParts

_log = get_logger(__name__)


class CountedBatches(EngineHook):
    """Warns of a loop that accumulates by itself: its first loss is divided by the number of batches, or `step` came
    after several of them, for the second time.

    Several losses of one batch are no batches: one is counted for each that `engine.dataloader` gave or, where that is
    not iterated, for each training forward with a backward.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._is_new_forward = False
        self._batches = self._late_steps = 0
        self._is_first_loss = parts.accumulation.reduction == "mean"

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_new_forward |= self._parts.model.training

    def before_backward(self, loss: Any) -> None:
        length = self._parts.accumulation.length
        if self._is_first_loss and divisor_of(loss) == length:
            _log.warning(
                "the loss that engine.backward was given is divided by %d, and gradient_accumulation=%d divides it by "
                "that number, too: gradients are 1/%d of what they should be. Remove the division from the loop",
                *(length, length, length),
            )
        self._is_first_loss = False

    def after_backward(self, loss: Any) -> None:
        loader = self._parts.dataloader
        self._batches += loader.is_untouched if loader is not None and loader.runs else self._is_new_forward
        self._is_new_forward = False

    def before_step(self) -> None:
        batches, self._batches = self._batches, 0
        self._late_steps += batches > 1
        if batches > 1 and self._late_steps == 2:
            length = self._parts.accumulation.length
            _log.warning(
                "engine.step() came after %d batches, twice by now, but with gradient_accumulation=%d it counts them "
                "itself: each call stands for one batch, so that updates are made of more batches than they are "
                "divided by. Delete the `if` around engine.step() and call it for each batch; or set "
                "gradient_accumulation=1 and divide the loss by %d yourself",
                *(batches, length, batches),
            )


class SameInputs(EngineHook):
    """Warns after the first update if the user's own loader gives all data ranks the same batches."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._inputs: Any = None
        self._is_over = False

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_over and self._parts.model.training:
            self._inputs = args, kwargs

    def after_step(self, result: StepResult) -> None:
        if self._is_over:
            return
        context = self._parts.context
        if are_same(self._inputs, context.dp_group):
            _log.warning(
                "all %d data ranks were given the same inputs in the first update: they seem to train on the same "
                "batches. Shard the data by engine.context.dp_rank of dp_size (batches[dp_rank::dp_size]), or seed "
                "what draws them by rank (torch.manual_seed(seed + dp_rank)); a DataLoader that is given to initialize "
                "is sharded",
                context.dp_size,
            )
        self._is_over, self._inputs = True, None
