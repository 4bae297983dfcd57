"""What the mesh means for data and gradients: which batches ranks have, and how gradients become complete."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from torch import nn

from .amp.optimizer import MixedPrecisionOptimizer
from .division import Division, reduce_options
from .errors import InputError
from .parallel.context import ParallelContext
from .parallel.gradients import CompleteGradients, Reduction, TensorGradients
from .parallel.objects import is_alone
from .parallel.registries import DATA_STRATEGIES

if TYPE_CHECKING:
    from .config import Config
    from .data.dataloader import EngineDataLoader
    from .debug.sync_check import SyncCheck


def refuse_uneven_evaluation(loader: Any, context: ParallelContext) -> None:
    """Raise InputError, on all ranks, if `loader` has more batches on some of them: under fsdp a batch needs all ranks,
    which hold the weights together.

    A loader without a length is not looked at.
    """
    if not isinstance(loader, Sized):
        return
    counts = context.everyone(len(loader))
    if min(counts) != max(counts):
        raise InputError(
            f"eval_dataloader has {max(counts)} batches on some ranks and {min(counts)} on others, but under "
            "data='fsdp' each batch needs all ranks, which hold the weights together; evaluate a multiple of batch "
            "size x data ranks, give the loader drop_last=True, or use data='zero1'"
        )


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
        reductions.append(_over_data_ranks(model, update, context, config, division))
    if division.tensor is not None:
        reductions.append(TensorGradients(division.tensor, update.master_weights.trained))
    if division.cut is not None and (groups := division.cut.tie_groups()):
        from .parallel.pipeline.ties import TiedGradients

        reductions.append(TiedGradients(division.cut.ties, groups, update.master_weights.trained))
    return CompleteGradients(reductions) if len(reductions) > 1 else next(iter(reductions), None)


def _over_data_ranks(
    model: nn.Module, update: MixedPrecisionOptimizer, context: ParallelContext, config: Config, division: Division
) -> Reduction:
    arguments = update.master_weights.trained, dict(model.named_buffers()), context.dp_group, reduce_options(config)
    if division.slices is not None:
        from .parallel.sharding.reducers import SliceReducer

        update.publisher = division.slices
        return SliceReducer(division.slices, *arguments)
    if division.sharded is not None:
        from .parallel.sharding.reducers import ShardReducer

        update.publisher = division.sharded
        is_part, weighted = division.tensor is not None or division.cut is not None, config.loss_reduction == "weighted"
        division.sharded.withholds = update.loss_scales.scale is not None or is_part or weighted
        return ShardReducer(division.sharded, *arguments, device=context.device)
    reduction: Reduction = DATA_STRATEGIES.get(config.parallel.data.strategy)(*arguments)
    return reduction


def make_sync(
    model: nn.Module,
    update: MixedPrecisionOptimizer,
    division: Division,
    context: ParallelContext,
    config: Config,
    dataloader: EngineDataLoader | None,
) -> SyncCheck | None:
    """What compares the ranks after each step, with `debug="sync"` and several ranks (a dry run has one)."""
    if config.debug != "sync" or context.size == 1 or is_alone():
        return None
    # Not in a run without it.
    from .checkpoint.contents import Holding
    from .debug.sync_check import SyncCheck

    return SyncCheck(Holding(model, update, division), context, dataloader)
