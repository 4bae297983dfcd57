"""Runs batches through the stages: forward and backward by torch's schedules, and evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InputError, shorten
from ...utils.tensors import map_tensors
from ...utils.torch_private import DATA_NEEDED
from ..rng import IsolatedRNG
from ..trial import meta_copy, run_without_data
from .axis import StageParameters
from .partition import Call, plain_attributes, plain_values, signature_of
from .schedules import TorchSchedule, forward_order
from .stage import Batch, ForwardContext, Stage, StageModule, Widen, on_wire, pack, restore

_MOST_SHAPES = 64
"""Metadata and schedules, which hold no memory of the device, are kept for this many shapes of batches."""

OnLast = Callable[[Collection[nn.Parameter], bool], None]
"""Called before the last backward of each stage, with the parameters that get gradients from it, and True if it is the
last backward on this rank."""


@dataclass(frozen=True)
class CallMetadata:
    """Metadata of calls of one shape.

    Attributes:
        modes: `Pipeline.modes` of the model, with which stages have these outputs.
        stages: each stage's output: a tree of tensors on the meta device.
        schedules: torch's, by the number of microbatches.
    """

    modes: str
    stages: Sequence[Any]
    schedules: dict[int, Any] = field(default_factory=dict)


class Pipeline:
    """The stages of one rank, and the passes of batches through them.

    Args:
        model: the user's model, of which this rank holds the parameters of its stages.
        forward_context: the scopes of the stages' forward.

    Attributes:
        params: the parameters of this rank.
        context: the layout.
        stages: the stages of this rank.
        has_last: True if this rank has the last stage.
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
        self.has_last = partition.ranks[-1] == context.pp_rank
        named = list(model.named_parameters(remove_duplicate=False))
        for index, module in self._modules.items():
            module.params = [p for name, p in named if index in partition.stages_of(name)]
        self._error = ""
        traces = any(piece.prepare is not None for piece in partition.pieces)
        self._traced = [module for _, module in partition.not_called(model) if traces]
        self._known: dict[str, CallMetadata] = {}

    def look_up(self, call: Call) -> CallMetadata:
        """The metadata of calls like `call`, with the model in its present modes. Each rank infers those of all stages.

        Raises:
            InputError: an error has left the pipeline in the middle of a batch.
            Exception: of a stage's forward.
        """
        if self._error:
            raise InputError(f"an error stopped this pipeline in the middle of a batch ({self._error}); end the run")
        modes = self.modes()
        # Not by all modes: torch's schedules send as they begin, and ranks may have modules in other modes.
        key = f"{self._model.training} {signature_of(call)}"
        known = self._known.get(key)
        if known is None:
            if len(self._known) == _MOST_SHAPES:
                del self._known[next(iter(self._known))]
            trees: list[Any] = []
            for stage in range(len(self._partition.stages)):
                trees.append(self._infer_stage(call, stage, trees[-1] if trees else None))
            known = self._known[key] = CallMetadata(modes, trees)
        elif known.modes != modes:
            self._prepare(call)
            known = self._known[key] = replace(known, modes=modes)
        return known

    def _infer_stage(self, call: Call, stage: int, given: Any) -> Any:
        """The output of `stage` for `call`: a tree of tensors on the meta device. Nothing is computed.

        Args:
            given: the output of the stage before it; None for the first one.

        Raises:
            InputError: the forward needs values.
        """
        meta_model = self._prepare(call)

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
            before = {name for name, _ in _plain_tensors(meta_model)}  # such as the weight that weight_norm computes
            each, activations = Call(args, kwargs), map_tensors(_receive, given)
            with self._forward_context.autocast():
                for piece in self._partition.stages[stage]:
                    activations = piece.run(meta_model, each, activations)
            for name, value in _plain_tensors(meta_model):
                if name not in before and value.requires_grad and not value.is_leaf:
                    raise InputError(f"{name} keeps its graph on the model; return it in the output, or detach it")
            return activations

        try:
            with IsolatedRNG(0):
                tree = run_without_data(meta_model, run, self.context.device, call.args, dict(call.kwargs), given)
        except (*DATA_NEEDED, RuntimeError) as error:
            raise InputError(
                "the model's forward failed on the tensors without data with which a pipeline finds shapes (.item(), "
                f"`if` and boolean indexing on activations need values): {str(error).splitlines()[0]}"
            ) from error
        return map_tensors(_on_meta, tree)

    def _prepare(self, call: Call) -> nn.Module:
        """A copy without data of the full model, in the modes of this rank's, after `prepare` of its pieces for `call`.

        Raises:
            InputError: the model has other modules than at initialize, or cannot be traced for this call.
        """
        meta_model = meta_copy(self.params.meta_model, self.params.meta_model)
        if changed := sorted(dict(meta_model.named_modules()).keys() ^ dict(self._model.named_modules()).keys()):
            raise InputError(f"{shorten(changed)} were added or removed after initialize; close, and initialize again")
        for mine, theirs in zip(meta_model.modules(), self._model.modules(), strict=True):
            mine.training = theirs.training
            if theirs in self._traced:  # what others keep follows from a call: a table fits the length it was made for
                vars(mine).update(plain_attributes(theirs))
        for piece in self._partition.pieces:
            if piece.prepare is not None:
                piece.prepare(meta_model, call)
        return meta_model

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
        self,
        calls: Sequence[Call],
        known: CallMetadata,
        finish: Callable[[Any, int], torch.Tensor],
        on_last: OnLast,
        widen: Widen | None,
    ) -> None:
        """Run forward and backward of all microbatches, and add the gradients to those of the parameters.

        Args:
            calls: the microbatches, of one shape.
            known: the result of `look_up` for one of them; the model's modes have not changed since.
            finish: called as finish(output, index) on the last stage; returns the 0-dim loss for backward.
            widen: called with a stage's parameters before each of its backwards.
        """
        schedule = known.schedules.get(len(calls))
        if schedule is None:
            stages = [Stage(module, known.stages, self.context.device, self._group) for module in self.stages]
            schedule = known.schedules[len(calls)] = self._schedule.make(stages, len(calls))
        numbers, left = torch.arange(len(calls)), set(self._modules)

        def begin_last(module: StageModule) -> None:
            left.remove(module.index)
            on_last(module.params, not left)

        with self._one_batch():
            for module in self.stages:
                module.batch = Batch(calls, finish, begin_last, widen, known.stages)
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
    def evaluate(self, calls: Sequence[Call]) -> list[Any]:
        """The model's output for each of `calls`, without gradients; an empty list on ranks without the last stage.

        Stages compute different calls at once.
        """
        known = [self.look_up(call).stages for call in calls]
        ranks, me = self._partition.ranks, self.context.pp_rank
        last, outputs = len(ranks) - 1, []
        inputs: dict[int, list[list[torch.Tensor]]] = defaultdict(list)  # of each stage, in order
        with self._one_batch():
            for tick in forward_order(ranks, len(calls)):
                given: dict[int, list[torch.Tensor]] = {}
                for stage, number in tick:
                    if ranks[stage] == me:
                        trees = known[number]
                        activations = restore(inputs[stage].pop(0), trees[stage - 1]) if stage else None
                        output = self._modules[stage].compute(calls[number], activations)
                        if stage == last:
                            outputs.append(output)
                        else:
                            given[stage] = pack(output, trees[stage], self._forward_context.sent)
                works: list[dist.Work | None] = []
                # By the stage, on all ranks: messages that two ranks send to each other must not wait for each other.
                for stage, number in (each for each in tick if each[0] != last):
                    source, target = ranks[stage], ranks[stage + 1]
                    if source != target and source == me:
                        works += [dist.isend(t, group=self._group, group_dst=target) for t in given[stage]]
                    elif source != target and target == me:
                        wire = on_wire(known[number][stage], self._forward_context.sent)
                        given[stage] = [torch.empty_like(t, device=self.context.device) for t in wire]
                        works += [dist.irecv(t, group=self._group, group_src=source) for t in given[stage]]
                    if target == me:
                        inputs[stage + 1].append(given[stage])
                for work in filter(None, works):
                    work.wait()
        return outputs

    @contextmanager
    def _one_batch(self) -> Iterator[None]:
        """A scope that notes an error: the other ranks may then still wait for, or receive, messages of this batch."""
        try:
            yield
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors on modules that are neither parameters nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield ".".join(filter(None, (path, name))), value


def _receive(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a stage receives it: contiguous, and not a leaf, so that it may be changed in place."""
    received = tensor.detach().contiguous()
    return received.requires_grad_().clone() if tensor.requires_grad else received


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
