"""The axis `pipeline`: its keys, its plan, checks of the model, optimizer and batches, and the model of one rank, which
keeps the parameters and buffers of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn, optim

from ...errors import HalfmeshError, InputError, did_you_mean, shorten
from ...utils.param_shard import ParamShard
from ...utils.tensors import parameter_names, replace_data
from ...utils.torch_private import call_hooks, is_compiled
from ..axis import AppliedAxis, Axis, AxisInputs, PlanInputs
from ..mesh import ParallelContext
from ..reducer import Reduction, SharedGradients
from ..registries import DATA_STRATEGIES, SCHEDULES
from ..trial import meta_copy
from .partition import Partition, all_tensors, first_names, resolve

_OF_ALL_PARAMETERS = ("max_grad_norm", "max_norm", "clip_grad_norm", "d0", "d_coef")
"""Optimizer options that use all parameters together: LAMB's clipping, the step size of Prodigy and D-Adaptation."""


class PipelineParallelism(Axis):
    """`parallel.pipeline`."""

    dim = "pp"
    splits_params = False
    splits_modules = True
    splits_batch = "microbatches"
    cost = "stages send each microbatch's activations, and idle at the start and end of a batch (the bubble)"

    @staticmethod
    def sizes_to_try(ranks: int, node: int) -> Iterator[int]:
        """All sizes: stages send little, and may be in different machines."""
        yield from (size for size in range(2, ranks + 1) if ranks % size == 0)

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        """Numbers of microbatches and chunks that the schedule cannot run."""
        pipeline = config.parallel.pipeline
        size, microbatches = pipeline.size, pipeline.microbatches
        if microbatches is None:
            yield "parallel.pipeline.microbatches", f"is required when pipeline.size > 1; for example {2 * size}"
        schedule = SCHEDULES.get(pipeline.schedule)
        for key, message in schedule.find_problems(size, pipeline.chunks, microbatches):
            yield f"parallel.pipeline.{key}", message
        if schedule.splits_backward:
            for message in _find_split_problems(config):
                yield "parallel.pipeline.schedule", f"{pipeline.schedule!r} {message}"

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[Partition | None, list[str]]:
        options, partition, problems = inputs.options, None, list[str]()
        try:
            partition = resolve(inputs.model, options.size, options.chunks, options.partition, options.schedule)
        except HalfmeshError as error:
            problems.append(f"parallel.pipeline: {error}")
        problems += _find_problems(inputs, partition)
        problems += find_batch_problem(getattr(inputs.dataloader, "batch_size", None), options.microbatches or 1)
        return partition, problems

    @staticmethod
    def apply(inputs: AxisInputs) -> StageParameters:
        inputs.context.last_stage = inputs.plan.ranks[-1]
        return StageParameters(inputs.model, inputs.optimizer, inputs.plan, inputs.context)


def _find_split_problems(config: Any) -> Iterator[str]:
    """Features that need an undivided backward, not one for a stage's inputs and a later one for its weights."""
    strategy, instead = config.parallel.data.strategy, "or schedule='interleaved'"
    why = "computes the gradients of weights in a separate pass"
    if torch.__version__ < "2.13":
        yield f"{why}, where torch {torch.__version__} counts some twice; use torch 2.13 or later, {instead}"
    if DATA_STRATEGIES.get(strategy).shards_model:
        yield f"{why}, which {strategy!r} would miss; use data='zero1', {instead}"
    if config.compile.enabled:
        yield f"{why}, and compiled code has one backward for both; remove compile, {instead}"
    if config.activation_checkpoint.enabled or config.activation_offload:
        yield f"{why}, so activations would be computed or fetched twice; remove that, {instead}"
    if config.gradient_dtype == "float32":
        yield f"adds up the gradients of weights in the dtype of the weights; remove gradient_dtype, {instead}"


def _find_problems(inputs: PlanInputs, partition: Partition | None) -> Iterator[str]:
    """Reasons why model, optimizer and criterion cannot train where a rank holds some modules only."""
    model, criterion = inputs.model, inputs.criterion
    joint = {key: group[key] for group in inputs.optimizer.param_groups for key in _OF_ALL_PARAMETERS if group.get(key)}
    for key, value in joint.items():
        yield f"optimizer: {key}={value!r} uses all parameters; set it to None, and clip_grad_norm in the config"
    own = set(criterion.parameters()) if isinstance(criterion, nn.Module) else ()
    if names := [name for name, param in model.named_parameters() if param in own]:
        yield f"criterion: no stage would have {shorten(names)}, weights of the model; use them in its last module"
    known = [name for called in (model, criterion) if called is not None for name in parameter_names(called)]
    for name in (n for n in inputs.options.non_split if n not in known and not any(k.startswith("*") for k in known)):
        near = did_you_mean(name, known)
        yield f"parallel.pipeline.non_split: neither the model nor the criterion has an argument {name!r}{near}"
    if any(is_compiled(module) for module in model.modules()):
        yield "a compiled model cannot be split into stages; pass it uncompiled"
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            yield f"{name}: SyncBatchNorm needs all ranks, but other stages do not have the layer; use BatchNorm"
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (module.sparse or module.scale_grad_by_freq):
            yield f"{name}: sparse=True and scale_grad_by_freq=True do not work under a pipeline; leave them out"
    if partition is None:
        return
    ranks, buffers = partition.holders(model), model.named_buffers(remove_duplicate=False)
    if names := [n for n, x in buffers if n.rpartition(".")[2].startswith("running_") and len(ranks[id(x)]) > 1]:
        yield f"{shorten(names)}: stages that share a norm would each keep running statistics; give each its own norm"
    passed = partition.not_called(model)
    if names := [name or "the model itself" for name, module in passed if call_hooks(module)]:
        yield f"{shorten(names)}: it has hooks, but stages do not call it; register them on the modules inside it"


def find_batch_problem(size: Any, microbatches: int) -> Iterator[str]:
    """The reason why a batch of `size` rows cannot be split into `microbatches`."""
    if isinstance(size, int) and size % microbatches:
        yield f"parallel.pipeline.microbatches={microbatches} does not divide the dataloader's batch_size={size}"


class StageParameters(AppliedAxis):
    """The model of one rank. Modules, names and the remaining parameters are the same objects as before; parameters and
    buffers that only other ranks hold become None, and leave the optimizer with their state.

    Args:
        model: equal on all ranks, on any device.
        optimizer: over its parameters.

    Attributes:
        meta_model: a copy of the full model without data, with nothing frozen, to infer shapes.
        tries: the first outputs and losses are compared with those of the whole batch.
        ties: the parameters of this rank that other ranks also hold, with the pipeline ranks of all holders.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, partition: Partition, context: ParallelContext
    ) -> None:
        super().__init__(context, "pp")
        self.tries = True
        self.partition = partition
        try:
            self.meta_model = meta_copy(model, model)
        except Exception as error:
            raise InputError(f"a pipeline needs a copy of the model, which copy.deepcopy rejects: {error}") from error
        self.first_names = first_names(model)
        self.context = context
        holders = partition.holders(model)
        shared = [(name, p, holders[id(p)]) for name, p in model.named_parameters() if len(holders[id(p)]) > 1]
        self._shared_names = sorted(name for name, _, _ in shared)
        self._shared_by = sorted({ranks for _, _, ranks in shared})
        self.ties: dict[nn.Parameter, tuple[int, ...]] = {p: ranks for _, p, ranks in shared if self.rank in ranks}
        self._foreign = {name: t for name, t in all_tensors(model) if self.rank not in holders[id(t)]}
        self._drop(model, optimizer)
        model.register_forward_pre_hook(self._reject_call)
        model.register_load_state_dict_pre_hook(self._take_own)
        model.register_load_state_dict_post_hook(self._expect_own)

    def replicas(self, param: nn.Parameter) -> int:
        return len(self.ties.get(param, [0]))

    def make_reduction(self, shards: Sequence[ParamShard]) -> Reduction | None:
        groups = {ranks: self.context.subgroup(ranks, "pp") for ranks in self._shared_by}  # all ranks together
        sums = [
            SharedGradients({p for p, holders in self.ties.items() if holders == ranks}, group, shards)
            for ranks, group in groups.items()
            if group is not None
        ]
        return Reduction(sums) if sums else None

    def skip_trial(self) -> None:
        self.tries = False

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        """Schedule, bubble, the rank and fraction of parameters of each stage, and tensors that stages share."""
        partition, microbatches = self.partition, options.microbatches or 1
        total = sum(partition.costs) or 1
        bubble = SCHEDULES.get(options.schedule).bubble(options.size, options.chunks, microbatches)
        rows = [f"{options.schedule}, {microbatches} microbatches, bubble {bubble:.0%}"]
        for index, (stage, rank) in enumerate(zip(partition.stages, partition.ranks, strict=True)):
            names, share = (stage[0].name, stage[-1].name)[: len(stage)], partition.costs[index] / total
            rows.append(f"{index} on pp {rank}: {' to '.join(names)} ({share:.0%} of parameters)")
        rows += [f"on several stages: {shorten(self._shared_names)}"] if self._shared_names else []
        return {"layout": "every rank holds its stages", "stages": "; ".join(rows)}

    @torch.no_grad()
    def _drop(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Free what only other ranks hold."""
        for name, tensor in self._foreign.items():
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, None)
            replace_data(tensor, torch.empty(0, dtype=tensor.dtype))
            tensor.grad = None
        foreign = set(map(id, self._foreign.values()))
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in foreign:
                    optimizer.state.pop(param, None)
            group["params"] = [param for param in group["params"] if id(param) not in foreign]

    # -- hooks on the model ------------------------------------------------------------------------------------

    def _take_own(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Keep only this rank's entries of a state dict of the full model."""
        for name in self._foreign:
            state.pop(prefix + name, None)

    def _expect_own(self, module: nn.Module, keys: Any) -> None:
        """Ignore the counter that BatchNorm adds to state dicts without versions, if this rank does not hold it."""
        keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if key not in self._foreign]

    def _reject_call(self, model: nn.Module, *_: Any) -> NoReturn:
        raise InputError(f"this rank holds only stage {self.rank} of the model; call engine(...) on all ranks instead")
