"""Runs batches through the stages: forward and backward by torch's schedules, and evaluation."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InputError
from ..comm import broadcast_object, is_simulated
from ..rank_checks import attempt
from .axis import StageParameters
from .fx_trace import plain_values
from .pieces import Call, signature_of
from .schedules import TorchSchedule, forward_order
from .stage import Batch, ForwardContext, Stage, StageModule
from .transport import infer_stages, on_wire, pack, prepare, restore

_MOST_SHAPES = 64
"""Metadata and schedules, which hold no memory of the device, are kept for this many shapes of batches."""

OnLast = Callable[[Collection[nn.Parameter], bool], None]
"""Called before the last backward of each stage, with the parameters that get gradients from it, and True if it is the
last backward on this rank."""


@dataclass(frozen=True)
class CallMetadata:
    """Metadata of calls of one shape.

    Attributes:
        modes: `Pipeline.modes` of the model, with which this rank's stages have these outputs.
        stages: each stage's output: a tree of tensors on the meta device.
        schedules: torch's, by the number of microbatches.
    """

    modes: str
    stages: Sequence[Any]
    schedules: dict[int, Any] = field(default_factory=dict)


class Pipeline:
    """The stages of one rank, and the passes of batches through them.

    Args:
        model: the user's, of which this rank holds the parameters of its stages.
        forward_context: the scopes of the stages' forward.

    Attributes:
        params: those of this rank.
        context: the mesh.
        stages: those of this rank.
        last_rank: the pipeline rank that has the last stage.
        has_last: this rank has it.
    """

    def __init__(
        self, model: nn.Module, params: StageParameters, schedule: TorchSchedule, forward_context: ForwardContext
    ) -> None:
        self.params = params
        self._partition = partition = params.partition
        self._schedule = schedule
        self._model = model
        self.context = context = params.context
        self._forward_context = forward_context
        self._group = context.subgroup(range(context.pp_size), "pp")  # the loss must not wait for earlier sends
        self._modules = {
            index: StageModule(model, partition.stages[index], index, len(partition.stages), forward_context)
            for index, rank in enumerate(partition.ranks)
            if rank == context.pp_rank
        }
        self.stages: Collection[StageModule] = self._modules.values()
        self.last_rank = partition.ranks[-1]
        self.has_last = self.last_rank == context.pp_rank
        named = list(model.named_parameters(remove_duplicate=False))
        for index, module in self._modules.items():
            module.params = [p for name, p in named if index in partition.stages_of(name)]
        self._error = ""
        self._traced = [module for _, module in partition.traced(model)]
        self._known: dict[str, CallMetadata] = {}
        self._on_last: OnLast = lambda params, rest: None
        self._left = 0

    def takes(self, microbatches: int) -> bool:
        """Return True if the schedule can run this number of microbatches."""
        size, stages = self.context.pp_size, len(self._partition.stages)
        return not any(self._schedule.find_problems(size, stages // size, microbatches))

    def look_up(self, call: Call) -> CallMetadata:
        """The metadata of calls like `call`, with the model in its present modes. All ranks of the pipeline together.

        Raises:
            InputError: an error has left the pipeline in the middle of a batch.
            Exception: of a stage's forward, raised on all ranks.
        """
        if self._error:
            raise InputError(
                f"an error has left this pipeline in the middle of a batch ({self._error}); end the run: a batch "
                "cannot be skipped by catching its error"
            )
        modes = self.modes()
        # Not by all modes: ranks whose modes differ would not ask for shapes in the same calls.
        key = f"{self._model.training} {signature_of(call)}"
        known = self._known.get(key)
        if known is None:
            if len(self._known) == _MOST_SHAPES:
                del self._known[next(iter(self._known))]
            known = self._known[key] = CallMetadata(modes, self._infer(call))
        elif known.modes != modes:
            prepare(self.params, self._model, call)
            known = self._known[key] = replace(known, modes=modes)
        return known

    def _infer(self, call: Call) -> Sequence[Any]:
        """Each stage's output for `call`: each rank finds those of its stages, and tells them the others."""
        ranks, trees = self._partition.ranks, list[Any]()
        infer = partial(infer_stages, self.params, self._model, call, self._forward_context.autocast)
        if is_simulated():  # there are no other ranks
            return infer(range(len(ranks)), None)
        for stage, rank in enumerate(ranks):
            result, failure, error = b"", None, None
            if rank == self.context.pp_rank:
                given = trees[-1] if trees else None
                result, failure, error = attempt(lambda: pickle.dumps(infer([stage], given)))  # noqa: B023
            result, failure = broadcast_object((result, failure), rank, self.context.device, self.context.group("pp"))
            if failure:
                words, is_input = failure
                raise error or (InputError if is_input else RuntimeError)(words)
            with torch.inference_mode(False):
                trees += pickle.loads(result)
        return trees

    def can_run(self, call: Call) -> bool:
        """Return True if the forward accepts `call`: it may be limited to one size of batches, or to training."""
        try:
            self.look_up(call)
        except InputError:
            return False
        return True

    def on_any_rank(self, *flags: bool) -> list[bool]:
        """For each of `flags`, True if it is set on a rank that computes the same batch. All of these ranks together;
        it waits for the device."""
        counts = torch.tensor(flags, dtype=torch.int32, device=self.context.device)
        for axis in self.context.sizes:
            if axis != "dp":
                self.context.all_reduce(counts, axis)
        return [count > 0 for count in counts.tolist()]

    def modes(self) -> str:
        """A key of the model's computation: the modules in training mode, and plain attributes of traced ones."""
        training = "".join("01"[module.training] for module in self._model.modules())
        return f"{training} {plain_values(self._traced)}" if self._traced else training

    def train(
        self, calls: Sequence[Call], known: CallMetadata, finish: Callable[[Any, int], torch.Tensor], on_last: OnLast
    ) -> None:
        """Run forward and backward of all microbatches, and add the gradients to those of the parameters.

        Args:
            calls: the microbatches, of one shape.
            known: the result of `look_up` for one of them; the model's modes have not changed since.
            finish: called as finish(output, index) on the last stage; returns the 0-dim loss for backward.
        """
        schedule = known.schedules.get(len(calls))
        if schedule is None:
            stages = [
                Stage(module, known.stages, self.context.device, self._group, partial(self._begin_last, index))
                for index, module in self._modules.items()
            ]
            schedule = known.schedules[len(calls)] = self._schedule.make(stages, len(calls))
        self._on_last, self._left = on_last, len(self._modules)
        numbers = torch.arange(len(calls))
        with self._one_batch():
            for module in self.stages:
                module.batch = Batch(calls, finish, known.stages)
            try:
                schedule.step(**{"index": numbers} | ({"target": numbers} if self.has_last else {}))
            except RuntimeError as error:
                # torch wraps the errors of the model and the criterion in another error.
                own = error.__cause__
                if own is None:
                    raise
                raise own from own.__cause__
            finally:
                for module in self.stages:
                    module.batch = None

    @torch.no_grad()
    def evaluate(self, calls: Sequence[Call], metadata: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        """The model's output for each of `calls`, without gradients; an empty list on ranks without the last stage.

        Stages compute different calls at once.

        Args:
            metadata: `look_up(call).stages` for each of them, if it is known.
        """
        known = [self.look_up(call).stages for call in calls] if metadata is None else metadata
        ranks, me = self._partition.ranks, self.context.pp_rank
        last, outputs = len(ranks) - 1, []
        done = [0] * len(ranks)
        inputs: dict[int, list[list[torch.Tensor]]] = defaultdict(list)  # of each stage, in order
        with self._one_batch():
            for tick in forward_order(ranks, len(calls)):
                given: dict[int, list[torch.Tensor]] = {}
                for stage in (stage for stage in tick if ranks[stage] == me):
                    trees = known[done[stage]]
                    activations = restore(inputs[stage].pop(0), trees[stage - 1]) if stage else None
                    output = self._modules[stage].compute(calls[done[stage]], activations)
                    if stage == last:
                        outputs.append(output)
                    else:
                        given[stage] = pack(output, trees[stage])
                works: list[dist.Work | None] = []
                # By the stage, on all ranks: messages that two ranks send to each other must not wait for each other.
                for stage in (stage for stage in tick if stage != last):
                    source, target = ranks[stage], ranks[stage + 1]
                    if source != target and source == me:
                        works += [dist.isend(t, group=self._group, group_dst=target) for t in given[stage]]
                    elif source != target and target == me:
                        given[stage] = self._empty(known[done[stage]][stage])
                        works += [dist.irecv(t, group=self._group, group_src=source) for t in given[stage]]
                    if target == me:
                        inputs[stage + 1].append(given[stage])
                for work in filter(None, works):
                    work.wait()
                for stage in tick:
                    done[stage] += 1
        return outputs

    def share(self, output: Any, tree: Any) -> Any:
        """The last stage's `output`, a `tree` of tensors, on all ranks."""
        tensors = pack(output, tree) if self.has_last else self._empty(tree)
        for tensor in tensors:
            self.context.broadcast(tensor, "pp", self.last_rank)
        return output if self.has_last else restore(tensors, tree)

    @contextmanager
    def _one_batch(self) -> Iterator[None]:
        """A scope that notes an error: the other ranks may then still wait for, or receive, messages of this batch."""
        try:
            yield
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise

    def _begin_last(self, index: int) -> None:
        """Called before the last backward of stage `index`."""
        self._left -= 1
        self._on_last(self._modules[index].params, self._left == 0)

    def _empty(self, tree: Any) -> list[torch.Tensor]:
        return [torch.empty(t.shape, dtype=t.dtype, device=self.context.device) for t in on_wire(tree)]


def refuse_own_loss(output: Any) -> None:
    """Raise InputError if the model returns a scalar, which is a loss."""
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        raise InputError(
            "the model returns its own loss, but a pipeline computes the loss of each microbatch on its last stage; "
            "let it return its outputs, give initialize a criterion, and write loss = engine.criterion(output, target)"
        )
