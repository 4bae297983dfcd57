"""`parallel.pipeline` as an axis of the mesh: its keys, its plan, and checks of the model, optimizer and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from ...errors import did_you_mean, shorten
from ...utils.log import get_logger
from ...utils.tensors import parameter_names
from ...utils.torch_private import is_compiled
from ..axis import Axis, AxisInputs, PlanInputs
from ..registries import DATA_STRATEGIES, SCHEDULES

if TYPE_CHECKING:
    from .partition import Partition
    from .stage_params import StageParameters

_log = get_logger(__name__)

_OF_ALL_PARAMETERS = ("max_grad_norm", "max_norm", "clip_grad_norm", "d0", "d_coef")
"""Optimizer options that use all parameters together: LAMB's clipping, the step size of Prodigy and D-Adaptation."""


class PipelineParallelism(Axis):
    """`parallel.pipeline`."""

    dim = "pp"
    splits_params = False
    splits_modules = True
    splits_batch = "microbatches"
    cost = "stages send each microbatch's activations, and wait at the beginning and the end of a batch (the bubble)"

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
            start = f"pipeline=dict(size={size}, microbatches={2 * size})"
            yield "parallel.pipeline.microbatches", f"is required when pipeline.size > 1; {start} is a start"
        schedule = SCHEDULES.get(pipeline.schedule)
        for key, message in schedule.find_problems(size, pipeline.chunks, microbatches):
            yield f"parallel.pipeline.{key}", message
        if schedule.splits_backward:
            for message in _find_split_problems(config):
                yield "parallel.pipeline.schedule", f"{pipeline.schedule!r} {message}"

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[Partition | None, list[str]]:
        from .partition import resolve

        model, options = inputs.model, inputs.options
        _warn_of_sequences(model)
        partition, problems = resolve(model, options.size, options.chunks, options.partition, options.schedule)
        return partition, [
            *_find_optimizer_problem(inputs.optimizer),
            *_find_module_problems(model),
            *_find_criterion_problem(model, inputs.criterion),
            *(f"parallel.pipeline: {problem}" for problem in problems),
            *_find_unknown_arguments(model, inputs.criterion, options.non_split),
            *find_batch_problem(getattr(inputs.dataloader, "batch_size", None), options.microbatches or 1),
        ]

    @staticmethod
    def apply(inputs: AxisInputs) -> StageParameters:
        from .stage_params import StageParameters

        inputs.context.last_stage = inputs.plan.ranks[-1]
        return StageParameters(inputs.model, inputs.optimizer, inputs.plan, inputs.context)


def _find_split_problems(config: Any) -> Iterator[str]:
    """Features that need an undivided backward, not one for a stage's inputs and a later one for its weights."""
    strategy, instead = config.parallel.data.strategy, "or schedule='interleaved'"
    why = "computes the gradients of weights in a pass of its own"
    if torch.__version__ < "2.13":
        found = f"torch {torch.__version__} counts weights that a stage uses several times (a GRU, tied ones) twice"
        yield f"{why}, where {found}; use torch 2.13 or later, {instead}"
    if DATA_STRATEGIES.get(strategy).shards_model:
        yield f"{why}, which {strategy!r} would not notice; use data='zero1', {instead}"
    if config.compile.enabled:
        yield f"{why}, and compiled code has one backward for all; leave compile out, {instead}"
    if config.activation_checkpoint.enabled or config.activation_offload:
        yield f"{why}, so that activations would be computed or fetched twice; leave that out, {instead}"
    if config.gradient_dtype == "float32":
        yield f"adds weights' gradients up in the dtype of the weights; leave gradient_dtype out, {instead}"


def _find_optimizer_problem(optimizer: optim.Optimizer) -> Iterator[str]:
    """The reason why `optimizer` cannot step the parameters of one stage separately."""
    for group in optimizer.param_groups:
        for key in filter(group.get, _OF_ALL_PARAMETERS):
            yield (
                f"optimizer: {type(optimizer).__name__} has {key}={group[key]!r}, which it applies to all its "
                "parameters together, but each rank of a pipeline holds only those of its stages; set it to None (for "
                "clipping there is clip_grad_norm in the config), or use another optimizer"
            )
            return


def _find_module_problems(model: nn.Module) -> Iterator[str]:
    if any(is_compiled(module) for module in model.modules()):
        yield "a compiled model cannot be cut into stages; pass it uncompiled"
    synced = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if synced:
        yield (
            f"{shorten(synced)}: SyncBatchNorm needs all ranks, but other stages do not have the layer; use BatchNorm, "
            "whose running statistics are averaged over the data ranks"
        )


def _find_criterion_problem(model: nn.Module, criterion: Any) -> Iterator[str]:
    own = set(criterion.parameters()) if isinstance(criterion, nn.Module) else ()
    if names := [name for name, param in model.named_parameters() if param in own]:
        yield (
            f"criterion: it uses weights of the model ({shorten(names)}), which belong to no stage; let the last "
            "module of the forward use them (logits of ArcFace), or return with its output what the criterion takes of "
            "them (one value for each row); or train without parallel.pipeline"
        )


def _find_unknown_arguments(model: nn.Module, criterion: Any, non_split: Sequence[str]) -> Iterator[str]:
    """Names in `non_split` that neither the model nor the criterion takes."""
    known = [name for what in (model, criterion) if what is not None for name in parameter_names(what)]
    takes_anything = any(name.startswith("*") for name in known)
    for name in () if takes_anything else non_split:
        if name not in known:
            yield (
                f"parallel.pipeline.non_split: neither {type(model).__name__}.forward nor the criterion has an "
                f"argument {name!r}{did_you_mean(name, known)}; they have {', '.join(known)}"
            )


def find_batch_problem(size: Any, microbatches: int) -> Iterator[str]:
    """The reason why a batch of `size` rows cannot be split into `microbatches`."""
    if isinstance(size, int) and size % microbatches:
        yield (
            f"parallel.pipeline.microbatches={microbatches} does not divide the dataloader's batch_size={size}; change "
            "one of the two"
        )


def _warn_of_sequences(model: nn.Module) -> None:
    """Warn of layers whose first dim is the sequence, torch's default, and not the batch."""
    kinds = (nn.MultiheadAttention, nn.RNNBase)
    found = [n for n, module in model.named_modules() if isinstance(module, kinds) and not module.batch_first]
    if found:
        _log.warning(
            "batch_first=False: the inputs of %s are [sequence, batch, ...], but a pipeline splits dim 0 of what the "
            "model is called with; if that is the sequence, transpose within the model, or build the layers with "
            "batch_first=True",
            shorten(found),
        )
