"""What the mesh means for data and gradients: this rank's part of a loader, and how gradients become complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .amp.optimizer import MixedPrecisionOptimizer
from .division import Division
from .engine.samplers import generators, shard_loader
from .parallel.context import ParallelContext
from .parallel.gradients import CompleteGradients, Reduction, TensorGradients
from .parallel.reducer import ReduceOptions
from .parallel.registries import DATA_STRATEGIES

if TYPE_CHECKING:
    from .config import Config


def shard(loader: Any, context: ParallelContext, seed: int, training: bool) -> Any:
    """This data rank's part of a loader; `training` pads it, so that no rank runs out before the others."""
    if loader is None:
        return None
    for generator in generators(loader) if context.size > 1 else ():
        state = generator.get_state()
        context.broadcast(state)  # the ranks must draw the same order to take disjoint parts of it
        generator.set_state(state)
    agree, copies = context.agree if training else None, context.size // context.dp_size
    return shard_loader(loader, context.dp_rank, context.dp_size, seed, pad=training, agree=agree, copies=copies)


def batch_seed(seed: int, context: ParallelContext) -> int | None:
    """What batches are fetched with where several ranks must get the same ones."""
    return None if context.size == context.dp_size else seed + context.dp_rank


def make_reduction(
    model: nn.Module,
    update: MixedPrecisionOptimizer,
    context: ParallelContext,
    config: Config,
    division: Division,
) -> Reduction | None:
    """What makes gradients complete: over the data ranks, then over the tensor group, then over stages that share a
    parameter."""
    reductions: list[Reduction] = []
    if context.dp_size > 1:
        reductions.append(_over_data_ranks(model, update, context, config))
    if division.tensor is not None:
        reductions.append(TensorGradients(division.tensor, update.holdings.trained))
    if division.cut is not None and (groups := division.cut.tie_groups()):
        from .parallel.pipeline.ties import TiedGradients

        reductions.append(TiedGradients(division.cut.ties, groups, update.holdings.trained))
    return CompleteGradients(reductions) if len(reductions) > 1 else next(iter(reductions), None)


def _over_data_ranks(
    model: nn.Module, update: MixedPrecisionOptimizer, context: ParallelContext, config: Config
) -> Reduction:
    data = config.parallel.data
    options = ReduceOptions(
        dtype=getattr(torch, data.reduce_dtype),
        bucket_bytes=int(data.bucket_mb * 2**20),
        max_inflight=data.max_inflight,
        mean=config.loss_reduction == "mean",
    )
    strategy = DATA_STRATEGIES.get(data.strategy)
    return strategy(update.holdings.trained, dict(model.named_buffers()), context.dp_group, options)
