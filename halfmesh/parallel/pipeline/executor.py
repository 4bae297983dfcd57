"""Batches through the stages: forward and backward by torch's schedules, and forward alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InputError
from ..context import ParallelContext
from .fx_trace import plain_values
from .pieces import Call, signature_of
from .schedules import Schedule
from .stage import Batch, ForwardContext, StageModule, make_stage
from .stage_params import StageParameters
from .transport import on_wire, pack, restore

MOST_SHAPES = 64
"""For so many shapes of batches metadata and schedules are kept, which hold no memory of the device."""

OnLast = Callable[[Collection[nn.Parameter], bool], None]
"""Called before the last backward of each stage, with the parameters that get gradients from it, and whether it is the
last of all on this rank."""


@dataclass(frozen=True)
class CallMetadata:
    """What is known of calls of one shape.

    Attributes:
        modes: those of the model then.
        stages: what each stage returns.
        schedules: by the number of microbatches.
    """

    modes: str
    stages: Sequence[Any]
    schedules: dict[int, Any] = field(default_factory=dict)


class Pipeline:
    """The stages of one rank, and how batches go through them.

    Args:
        model: the user's; this rank has its stages of it.
        params: which those are.
        schedule: in which order they work.
        forward_context: what their forward runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        params: StageParameters,
        schedule: Schedule,
        context: ParallelContext,
        forward_context: ForwardContext,
    ) -> None:
        self.partition = partition = params.partition
        self.schedule = schedule
        self._model = model
        self._meta_model = params.meta_model
        self._context = context
        self._forward_context = forward_context
        self._group = context.send_group
        self._count = len(partition.stages)
        self._modules = {
            index: StageModule(model, partition.stages[index], index, self._count, forward_context)
            for index in partition.of_rank(context.pp_rank)
        }
        named = list(model.named_parameters(remove_duplicate=False))
        self._params = {i: [p for name, p in named if i in partition.stages_of(name)] for i in self._modules}
        self._error = ""
        traces = any(piece.prepare is not None for piece in partition.pieces)
        self._traced = [module for _, module in partition.not_called(model)] if traces else []
        self._known: dict[str, CallMetadata] = {}  # the last used last
        self._on_last: OnLast = lambda params, rest: None
        self._left = 0

    @property
    def stages(self) -> Collection[StageModule]:
        """Those that this rank has."""
        return self._modules.values()

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self._count - 1 in self._modules

    @property
    def last_rank(self) -> int:
        """The pipeline rank that has the last stage."""
        return self.partition.rank_of(self._count - 1)

    def takes(self, microbatches: int) -> bool:
        """Whether the schedule can run so many microbatches."""
        size = self.partition.size
        return not any(self.schedule.find_problems(size, self._count // size, microbatches))

    def look_up(self, call: Call) -> CallMetadata:
        """What is sent for `call`, with the model in its present modes.

        Raises:
            InputError: an error has left the pipeline in the middle of a batch.
        """
        if self._error:
            raise InputError(
                f"this pipeline was left in the middle of a batch by an error ({self._error}), and the stages do not "
                "agree any more about what comes next; end the run (a batch cannot be left out by catching its error)"
            )
        modes = self.modes()
        key = f"{modes} {signature_of(call)}"
        known = self._known.pop(key, None)
        if known is None:
            stages = self._meta_model.infer(
                self.partition, call, self._model, self._context.device, self._forward_context
            )
            known = CallMetadata(modes, stages)
        self._known[key] = known
        if len(self._known) > MOST_SHAPES:
            del self._known[next(iter(self._known))]
        return known

    def modes(self) -> str:
        """What of the model decides what is computed: which modules train; of traced ones their plain values, too."""
        training = "".join("01"[module.training] for module in self._model.modules())
        return f"{training} {plain_values(self._traced)}" if self._traced else training

    def train(
        self, calls: Sequence[Call], known: CallMetadata, finish: Callable[[Any, int], torch.Tensor], on_last: OnLast
    ) -> None:
        """Forward and backward of all microbatches. Gradients are added to the parameters'.

        Args:
            calls: the microbatches, of one shape.
            known: what was looked up for one of them. The model's modes are still the same.
            finish: called as finish(output, index) on the last stage; returns what backward begins with (0-dim).
            on_last: told of the last backwards.
        """
        schedule = known.schedules.get(len(calls))
        if schedule is None:
            stages = [
                make_stage(module, known.stages, self._context.device, self._group, partial(self._begin_last, index))
                for index, module in self._modules.items()
            ]
            schedule = known.schedules[len(calls)] = self.schedule.make(stages, len(calls))
        self._on_last, self._left = on_last, len(self._modules)
        numbers = torch.arange(len(calls))
        with self._one_batch():
            for module in self._modules.values():
                module.batch = Batch(calls, finish, known.stages)
            try:
                schedule.step(**{"index": numbers} | ({"target": numbers} if self.has_last else {}))
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
        stages, output = self.look_up(call).stages, None
        with self._one_batch():
            for index, module in self._modules.items():
                received = None
                if index:
                    tensors = self._empty(stages[index - 1])
                    for tensor in tensors:
                        dist.recv(tensor, group_src=self.partition.rank_of(index - 1), group=self._group)
                    received = restore(tensors, stages[index - 1])
                output = module.compute(call, received)
                if module.is_last:
                    look(output)
                else:
                    for tensor in pack(output, stages[index]):
                        dist.send(tensor, group_dst=self.partition.rank_of(index + 1), group=self._group)
            if not everywhere:
                return output if self.has_last else None
            tensors = pack(output, stages[-1]) if self.has_last else self._empty(stages[-1])
            for tensor in tensors:
                self._context.broadcast(tensor, "pp", self.last_rank)
            return output if self.has_last else restore(tensors, stages[-1])

    @contextmanager
    def _one_batch(self) -> Iterator[None]:
        """An error on this rank leaves the others in the middle of the batch: what they get next would be another's."""
        try:
            with self._forward_context.host_random():
                yield
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise

    def _begin_last(self, index: int) -> None:
        """The last backward of stage `index` begins."""
        self._left -= 1
        self._on_last(self._params[index], self._left == 0)

    def _empty(self, tree: Any) -> list[torch.Tensor]:
        return [torch.empty(t.shape, dtype=t.dtype, device=self._context.device) for t in on_wire(tree)]


def refuse_own_loss(output: Any) -> None:
    """Raise InputError if the model returns a scalar: a loss of its own."""
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        raise InputError(
            "the model returns its own loss, which a pipeline has on its last stage only, one for each microbatch; let "
            "the model return its outputs, give a criterion to initialize, and write loss = engine.criterion(output, "
            "target)"
        )
