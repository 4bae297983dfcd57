"""From losses to complete gradients: one accumulation cycle after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..amp.cast import Precision
from ..amp.optimizer import MixedPrecisionOptimizer
from ..errors import InputError
from ..parallel.gradients import Reduction
from ..parallel.trained import SameTrained
from .accumulation import Accumulation
from .passes import Backward


class GradientCycle:
    """Collects the gradients of an update: backward by backward, then reduced over the data ranks.

    Attributes:
        begun: whether microbatches of this cycle are already counted.
        fresh: whether a backward ran since the last `count`.
        closes: whether the microbatch of the last backward is the last of the cycle.
        at_end: whether it was the last one that there is.
        averaged: whether the model holds averaged weights, which are not to be trained or saved as its own.
    """

    def __init__(
        self,
        update: MixedPrecisionOptimizer,
        precision: Precision,
        passes: Backward,
        accumulation: Accumulation,
        reducer: Reduction | None,
        same: SameTrained | None = None,
    ) -> None:
        self.begun = self.fresh = self.closes = self.at_end = self.averaged = False
        self.reducer = reducer
        self._same = same
        self._update = update
        self._precision = precision
        self._passes = passes
        self._accumulation = accumulation
        self._complete = False  # the gradients that are there are reduced
        self._trained = update.holdings.trainable()
        self._may_shrink = False  # what is frozen within a cycle takes part until its end
        self.clear()  # gradients older than the engine

    @property
    def holds_gradients(self) -> bool:
        """Whether there is something that an update has not used yet."""
        return self.begun or self.fresh

    @property
    def position(self) -> str:
        """The current microbatch, for messages: "2 of 4"."""
        return f"{self._accumulation.index + self.fresh} of {self._accumulation.length}"

    def add(self, loss: Any, at_end: bool, retain_graph: bool = False, loss_id: int = 0) -> None:
        """Run one backward. On the last microbatch its gradients are reduced while it runs, unless there are several
        losses: they are unscaled after backward, and another loss may follow.

        Args:
            at_end: no microbatch follows this one.

        Raises:
            InputError: `loss` is not a scalar with a graph, or `loss_id` is unknown.
        """
        if self.averaged:
            refuse_averaged(self, "engine.backward()")
        update = self._update
        if type(loss_id) is not int or loss_id not in update.losses.ids:
            update.losses.refuse(loss_id)
        loss = self._passes.check(loss)
        update.begin_backward()
        self.at_end, self.closes = at_end, at_end or self._accumulation.index + 1 >= self._accumulation.length
        sends = self.closes and not update.losses.several
        if self.reducer is not None:
            self._keep_covered(self.reducer)
            self.reducer.open(sends and self._passes.is_single)
        self._complete = False
        try:
            with self._precision.backward():
                self._passes.backward(loss, loss_id, retain_graph, self.reducer, sends)
            self._precision.forget_casts()
            self.fresh = True
            if sends:
                self.complete()
            update.note_gradients()
        except BaseException as error:
            if self.begun:
                error.add_note(
                    f"this was microbatch {self.position}; the gradients of those before it are cleared, too"
                )
            self.clear()  # half a gradient is worse than none: the next backward begins a new cycle
            raise

    @contextmanager
    def magnified(self, factor: float) -> Iterator[None]:
        """A scope in which backward gives gradients that are `factor` (a power of two) times as large."""
        divisor = self._accumulation.seed_divisor
        self._accumulation.seed_divisor = divisor / factor
        try:
            yield
        finally:
            self._accumulation.seed_divisor = divisor

    def count(self) -> None:
        """The current microbatch is over."""
        self._accumulation.index += self.fresh
        self.begun, self.fresh = self._accumulation.index > 0, False

    def complete(self) -> None:
        """Reduce what has not been reduced yet."""
        if self.reducer is not None and (self.reducer.stale or not self._complete):
            self.reducer.finish()
        self._complete = True

    def divisor(self) -> float | torch.Tensor:
        """Complete the gradients; returns what they still have to be divided by."""
        if self.averaged:
            refuse_averaged(self, "engine.step()")
        divisor = self._accumulation.divisor(self._accumulation.index + self.fresh)
        if self.reducer is not None and (self.reducer.stale or not self._complete):
            self._update.check_gradients(divisor)
            self.complete()
        return divisor

    def clear(self) -> None:
        """Forget the gradients and begin a new cycle."""
        self._update.zero_grad()
        self._begin_anew()

    def end(self) -> None:
        """The update is over: its gradients are used, or of no use."""
        self._update.zero_grad(after_update=True)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._precision.forget_casts()  # the weights may have changed
        self._accumulation.reset()
        if self.reducer is not None:
            self.reducer.forget()
        self.begun = self.fresh = self.closes = self.at_end = False

    def _keep_covered(self, reducer: Reduction) -> None:
        """Parameters may have been added to the optimizer, frozen or unfrozen since the last backward."""
        holdings = self._update.holdings
        trained = holdings.trainable()
        if trained == self._trained and not self._may_shrink:
            return
        if trained != self._trained:
            if self._same is not None:
                taking = {shard for shard, takes in trained if takes}
                flags = bytes(id(shard) in taking for shard in holdings.shards)
                self._same.compare([shard.name for shard in holdings.shards], flags)
            self._trained = trained
        if not reducer.covers(holdings.trained):
            reducer.cover(holdings.trained)
        self._may_shrink = self.holds_gradients


def refuse_inside(cycle: GradientCycle, call: str) -> None:
    """Raise InputError if `call` would lose the gradients that `cycle` holds, or take averaged weights for its own."""
    refuse_averaged(cycle, call)
    if cycle.holds_gradients:
        raise InputError(
            f"{call} was called after microbatch {cycle.position} and before the update, whose gradients it does not "
            "hold; call it after a step that returned a StepResult, or end the cycle first with engine.step(last=True)"
        )


def refuse_averaged(cycle: GradientCycle, call: str) -> None:
    """Raise InputError if the model holds averaged weights."""
    if cycle.averaged:
        raise InputError(
            f"{call} was called within `with average.applied():`, where the model holds the averaged weights in place "
            "of those that are trained; call it after that block"
        )
