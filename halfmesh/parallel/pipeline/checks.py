"""Whether a model and its batches fit a pipeline, before the model is split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn, optim

from ..._torch import is_compiled
from ...errors import did_you_mean, shorten
from ...log import get_logger
from .microbatches import parameter_names
from .partition import Partition, resolve

_log = get_logger(__name__)

_OF_ALL_PARAMETERS = ("max_grad_norm", "max_norm", "clip_grad_norm", "d0", "d_coef")
"""Options that act on all parameters together: LAMB's clipping, the step size of Prodigy and D-Adaptation."""


def find_optimizer_problem(optimizer: optim.Optimizer) -> str | None:
    """Why `optimizer` cannot step the parameters of one stage by themselves, if it cannot."""
    keys = ((key, group[key]) for group in optimizer.param_groups for key in _OF_ALL_PARAMETERS if group.get(key))
    for key, value in keys:
        return (
            f"optimizer: {type(optimizer).__name__} has {key}={value!r}, which it applies to all its parameters "
            "together, but each rank of a pipeline holds its stage's only; set it to None (for clipping there is "
            "clip_grad_norm in the config), or use another optimizer"
        )
    return None


def make_partition(model: nn.Module, criterion: Any, loader: Any, config: Any) -> tuple[Partition | None, list[str]]:
    """The stages of `model`, and everything that is wrong."""
    problems = []
    if any(is_compiled(module) for module in model.modules()):
        problems.append("the model is compiled, and cannot be cut any more; pass it uncompiled")
    synced = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if synced:
        problems.append(
            f"{shorten(synced)}: SyncBatchNorm joins all ranks, but other stages do not have the layer; use BatchNorm, "
            "whose running statistics are averaged over the data ranks"
        )
    _warn_of_sequences(model)
    partition, more = resolve(model, config.size, config.chunks, config.partition)
    problems += [f"parallel.pipeline: {problem}" for problem in more]
    problems += _find_unknown_arguments(model, criterion, config.non_split)
    size, microbatches = getattr(loader, "batch_size", None), config.microbatches or 1
    if isinstance(size, int) and size % microbatches:
        below, above = size // microbatches * microbatches, (size // microbatches + 1) * microbatches
        near = f"{below} or {above}" if below else str(above)
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        fitting = min(divisors, key=lambda n: abs(n - microbatches))
        problems.append(
            f"parallel.pipeline.microbatches={microbatches} does not divide the dataloader's batch_size={size}; use "
            f"batch_size={near}, or microbatches={fitting}"
        )
    return partition, problems


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


def _warn_of_sequences(model: nn.Module) -> None:
    """Layers of torch that by default take the sequence, and not the batch, as their first dim."""
    kinds = (nn.MultiheadAttention, nn.RNNBase)
    found = [n for n, module in model.named_modules() if isinstance(module, kinds) and not module.batch_first]
    if found:
        _log.warning(
            "%s take(s) [sequence, batch, ...] (batch_first=False), but a pipeline splits dim 0 of what the model is "
            "called with; if that is the sequence, transpose within the model, or build the layers with "
            "batch_first=True",
            shorten(found),
        )
