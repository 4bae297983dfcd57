"""Batches through the stages: forward and backward by torch's schedules, and forward alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._torch import call_hooks
from ...errors import InputError, shorten
from ..context import ParallelContext
from .boundary import Crossing, from_wire, leave
from .partition import Partition, all_entries
from .pieces import Call
from .schedules import Schedule
from .skeleton import Skeleton, signature_of
from .stage import Batch, StageModule, Surroundings, make_stage
from .tracing import plain_values

MOST_CROSSINGS = 256
MOST_SHAPES = 16
"""For so many shapes of batches what crosses is known, and a schedule kept, which holds no memory of the device."""

OnLast = Callable[[Collection[nn.Parameter], bool], None]
"""Called before the last backward of each stage, with the parameters that get gradients from it, and whether it is the
last of all on this rank."""


@dataclass(frozen=True)
class Known:
    """What was found out about calls like one that was looked up.

    Attributes:
        modes: those of the model then.
        key: of its shapes and modes.
        crossings: what each stage returns.
    """

    modes: str
    key: str
    crossings: Sequence[Crossing]


class Pipeline:
    """The stages of one rank, and how batches go through them.

    Args:
        model: the user's; this rank has its stages of it.
        skeleton: of the whole model.

    Attributes:
        partition: the stages of all ranks.
        schedule: in which order they work.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: Skeleton,
        partition: Partition,
        schedule: Schedule,
        context: ParallelContext,
        surroundings: Surroundings,
    ) -> None:
        self.partition = partition
        self.schedule = schedule
        self._model = model
        self._skeleton = skeleton
        self._context = context
        self._surroundings = surroundings
        self._group = context.send_group
        count = len(partition.stages)
        self._modules = {
            index: StageModule(model, partition.stages[index], index, count, surroundings)
            for index in partition.of_rank(context.pp_rank)
        }
        entries = partition.entries(model)
        tensors = dict(all_entries(model))
        self._params = {
            index: [t for e, t in tensors.items() if index in entries[e] and isinstance(t, nn.Parameter)]
            for index in self._modules
        }
        self._broken = ""
        self._not_called = [(n, m, len(call_hooks(m))) for n, m in partition.not_called(model)]
        self._traced = [model.get_submodule(name) for piece in partition.pieces for name in piece.looks_into]
        self._crossings: dict[str, Sequence[Crossing]] = {}  # the last used last
        self._schedules: dict[tuple[str, int], Any] = {}  # the last used last
        self._on_last: OnLast = lambda params, rest: None
        self._left = 0

    @property
    def stages(self) -> Collection[StageModule]:
        """Those that this rank has."""
        return self._modules.values()

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return len(self.partition.stages) - 1 in self._modules

    def takes(self, microbatches: int) -> bool:
        """Whether the schedule can run so many microbatches."""
        size = self.partition.size
        return not any(self.schedule.find_problems(size, len(self.partition.stages) // size, microbatches))

    @property
    def last_rank(self) -> int:
        """The pipeline rank that has the last stage."""
        return (len(self.partition.stages) - 1) % self.partition.size

    def train(
        self, calls: Sequence[Call], known: Known, finish: Callable[[Any, int], torch.Tensor], on_last: OnLast
    ) -> None:
        """Forward and backward of all microbatches. Gradients are added to the parameters'.

        Args:
            calls: the microbatches, of one shape.
            known: what was looked up for one of them. The model's modes are still the same.
            finish: called as finish(output, index) on the last stage; returns what backward begins with (0-dim).
            on_last: told of the last backwards.
        """
        self._refuse_if_unusable()
        schedule = self._schedule(known, len(calls))
        with self._in_one_piece():
            self._run(schedule, Batch(calls, finish, known.crossings), on_last)

    def _run(self, schedule: Any, batch: Batch, on_last: OnLast) -> None:
        numbers = torch.arange(len(batch.calls))
        self._on_last, self._left = on_last, len(self._modules)
        for module in self._modules.values():
            module.batch = batch
        try:
            given = {"index": numbers} | ({"target": numbers} if self.has_last else {})
            schedule.step(**given)
        except RuntimeError as error:
            # torch puts an error of its own around what a stage raises, the model's and the criterion's errors.
            own = error.__cause__
            if own is None:
                raise
            raise own from own.__cause__
        finally:
            for module in self._modules.values():
                module.batch = None

    @torch.no_grad()
    def evaluate(self, call: Call, look: Callable[[Any], None] = lambda output: None, everywhere: bool = True) -> Any:
        """The model's output for a whole batch, without gradients; on all ranks, or on the one with the last stage.

        Args:
            look: called with the output on the last stage.
        """
        known = self.look_up(call)
        with self._in_one_piece():
            return self._forward(call, known.crossings, look, everywhere)

    def _forward(self, call: Call, crossings: Sequence[Crossing], look: Callable[[Any], None], everywhere: bool) -> Any:
        size = self.partition.size
        output: Any = None
        for index, module in self._modules.items():
            carry = None
            if index:
                carry = self._receive(crossings[index - 1], (index - 1) % size)
            carry = module.compute(call, carry)
            if module.is_last:
                look(carry)
                output = carry
            else:
                for tensor in leave(carry, crossings[index]):
                    dist.send(tensor, group_dst=(index + 1) % size, group=self._group)
        if not everywhere:
            return output
        tensors = leave(output, crossings[-1]) if self.has_last else self._empty(crossings[-1])
        for tensor in tensors:
            self._context.broadcast(tensor, "pp", self.last_rank)
        return output if self.has_last else self._filled(crossings[-1], tensors)

    # -- parts -------------------------------------------------------------------------------------------------

    @contextmanager
    def _in_one_piece(self) -> Iterator[None]:
        """An error on this rank leaves the others in the middle of the batch: what they get next would be another's."""
        try:
            with self._surroundings.host_random():
                yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise

    def look_up(self, call: Call) -> Known:
        """What crosses for `call`, with the model in its present modes."""
        self._refuse_if_unusable()
        modes = self.modes()
        key = f"{modes} {signature_of(call)}"
        crossings = self._crossings.pop(key, None)
        if crossings is None:
            crossings = self._skeleton.crossings(
                self.partition, call, self._model, self._context.device, self._surroundings
            )
        self._crossings[key] = crossings
        if len(self._crossings) > MOST_CROSSINGS:
            del self._crossings[next(iter(self._crossings))]
        return Known(modes, key, crossings)

    def modes(self) -> str:
        """What of the model decides what is computed: which modules train; of traced ones their plain values, too."""
        training = "".join("01"[module.training] for module in self._model.modules())
        return f"{training} {plain_values(self._traced)}" if self._traced else training

    def _refuse_if_unusable(self) -> None:
        if self._broken:
            raise InputError(
                f"this pipeline was left in the middle of a batch by an error ({self._broken}), and the stages do not "
                "agree any more about what comes next; end the run (a batch cannot be left out by catching its error)"
            )
        hooked = [name or "the model itself" for name, module, own in self._not_called if len(call_hooks(module)) > own]
        if hooked:
            raise InputError(
                f"{shorten(hooked)}: hooks were registered on it, but under a pipeline it is not called as a whole; "
                "register them on the modules below it"
            )

    def _schedule(self, known: Known, count: int) -> Any:
        schedule = self._schedules.pop((known.key, count), None)
        if schedule is None:
            stages = [
                make_stage(module, known.crossings, self._context.device, self._group, partial(self._a_last, index))
                for index, module in self._modules.items()
            ]
            schedule = self.schedule.make(stages, count)
        self._schedules[known.key, count] = schedule
        if len(self._schedules) > MOST_SHAPES:
            del self._schedules[next(iter(self._schedules))]
        return schedule

    def _a_last(self, index: int) -> None:
        """The last backward of stage `index` begins."""
        self._left -= 1
        self._on_last(self._params[index], self._left == 0)

    def _empty(self, crossing: Crossing) -> list[torch.Tensor]:
        return [torch.empty(t.shape, dtype=t.dtype, device=self._context.device) for t in crossing.on_the_wire()]

    def _receive(self, crossing: Crossing, source: int) -> Any:
        tensors = self._empty(crossing)
        for tensor in tensors:
            dist.recv(tensor, group_src=source, group=self._group)
        return self._filled(crossing, tensors)

    def _filled(self, crossing: Crossing, tensors: Sequence[torch.Tensor]) -> Any:
        pairs = zip(tensors, crossing.tensors, strict=True)
        return crossing.fill([from_wire(tensor, meta.dtype) for tensor, meta in pairs])


def refuse_own_loss(output: Crossing) -> None:
    """Raise InputError if the model returns a scalar: a loss of its own."""
    if isinstance(output.tree, torch.Tensor) and output.tree.dim() == 0:
        raise InputError(
            "the model returns its own loss, which a pipeline has on its last stage only, one for each microbatch; let "
            "the model return its outputs, give a criterion to initialize, and write loss = engine.criterion(output, "
            "target)"
        )
