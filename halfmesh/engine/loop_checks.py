"""Checks of the user's loop and model while they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..amp.step_result import StepResult
from ..errors import InputError, shorten
from ..parallel.replica_checks import are_same, differ, is_checked, norms
from ..utils.engine_hook import EngineHook
from ..utils.log import get_logger
from .parts import EngineParts

_log = get_logger(__name__)


class CountedBatches(EngineHook):
    """Warns of a loop that accumulates by itself: `step` came after several batches, for the second time.

    Several losses of one batch are no batches: one is counted for each that `engine.dataloader` gave or, where that is
    not iterated, for each training forward with a backward.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._is_new_forward = False
        self._batches = self._late_steps = 0

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_new_forward |= self._parts.model.training

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


class ForwardWrites(EngineHook):
    """Refuses a model whose forward, or loop, writes into its weights what is lost, or what differs between ranks that
    hold the same weights and see other data. Looks before the first `engine.step`, the tenth, the hundredth and so on;
    before an evaluation, which may be meant to be of other weights, it warns of what is lost."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._steps = 0
        self._evaluated = -1  # at which of the steps

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._parts.model.training and self._evaluated != self._steps:
            self._evaluated = self._steps
            self._parts.update.master_weights.tell_uncounted()

    def before_step(self) -> None:
        self._steps += 1
        data = self._parts.division.data
        if is_checked(self._steps):
            uncounted = self._parts.update.master_weights.uncounted()
            found = data.find_lost_writes(False), uncounted, self._find_unlike()
            everyone = zip(*self._parts.context.everyone(found), strict=True)
            _refuse(*(sorted({name for names in theirs for name in names}) for theirs in everyone))
        if is_checked(self._steps + 1):
            data.find_lost_writes(True)

    def _find_unlike(self) -> set[str]:
        """Those that differ between ranks that should have the same."""
        context, division = self._parts.context, self._parts.division
        held, found = dict(self._parts.model.named_parameters()), set[str]()
        apart = [axis for axis in division.axes.values() if axis.dim in division.own_rng_axes]
        groups: list[Any] = [(context.dp_group, set(held))] if context.dp_size > 1 else []
        groups += [(context.group(a.dim), {n for n, p in held.items() if a.replicas(p) == a.size}) for a in apart]
        values = norms(held.values() if groups else (), context.device)
        for group, same in groups:
            flags = zip(held, differ(values, group).tolist(), strict=True)
            found.update(name for name, is_other in flags if is_other and name in same)
        return found


def _refuse(lost: Sequence[str], uncounted: Sequence[str], unlike: Sequence[str]) -> None:
    """Raise InputError if there are such parameters."""
    instead = (
        "Compute with a changed copy, as in weight = torch.renorm(self.weight, ...), which needs no write; or write "
        "after engine.step(), under torch.no_grad(), as in param.copy_(...)"
    )
    if lost:
        raise InputError(
            f"the model's forward writes into {shorten(lost)}, but under parallel.data='fsdp' it has gathered copies "
            f"of the weights, which are freed after it: what is written is lost. {instead}. Other data strategies keep "
            "what is written, if it is the same on all ranks"
        )
    if uncounted:
        raise InputError(
            f"forward, or the loop, has written into {shorten(uncounted)} through .data, which torch does not count: "
            "model and fp32 masters differ, and the update overwrites what was written. Write under torch.no_grad(), "
            "as in self.weight.copy_(...)"
        )
    if unlike:
        raise InputError(
            f"the weights {shorten(unlike)} differ between ranks that should hold the same: forward, or the loop, has "
            "written into them what depends on a rank's own batch or random numbers, so that the ranks' gradients are "
            f"not those of one model. {instead}, the same on all ranks: what depends on the weights alone, or on "
            "values that engine.context.all_reduce has averaged"
        )
