"""Apply a recipe to a model and its optimizer, and take it back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn, optim
from torch.utils.hooks import RemovableHandle

from ..shard import ParamShard, Ranks, reset_grad
from .master_weights import cast_state, masters_for, repoint
from .optimizer import MixedPrecisionOptimizer
from .originals import current_value
from .precision import cast_model, tensors_to_cast
from .recipe import Recipe, UpdateOptions
from .state_hooks import watch_state


def convert(
    model: nn.Module,
    optimizer: optim.Optimizer,
    shards: Sequence[ParamShard],
    recipe: Recipe,
    ranks: Ranks | None = None,
    options: UpdateOptions | None = None,
    device: torch.device | None = None,
    cast: Callable[[nn.Module, Recipe, Collection[int]], None] = cast_model,
) -> MixedPrecisionOptimizer:
    """Cast `model` in place and re-point `optimizer` to fp32 masters where the recipe keeps them.

    Masters are taken before the cast, from the full precision that the model came with; they take over its memory.
    `close` of what is returned undoes the conversion.

    Args:
        device: where updates are decided, see `MixedPrecisionOptimizer`.
        cast: casts the model.
    """
    dtypes = {name: tensor.dtype for name, tensor in named_tensors(model)}
    # What is sharded is cast where it is gathered: the parts are the masters.
    apart = {id(shard.source.param) for shard in shards if shard.source is not None and shard.original is not None}
    masters: dict[nn.Parameter, nn.Parameter] = {}
    if recipe.master_weights:
        to_cast = {id(tensor) for _, tensor in tensors_to_cast(model, recipe, apart)}
        masters = masters_for(optimizer, [shard for shard in shards if id(shard.model_param) in to_cast], {})
    came = dict(_not_trained(model, optimizer, shards, recipe, apart))
    cast(model, recipe, apart)
    for shard in shards:
        shard.rebind_view()
        reset_grad(shard.param)
    changed = {tensor: dtypes[name] for name, tensor in named_tensors(model) if tensor.dtype != dtypes[name]}
    if not recipe.master_weights:
        cast_state(optimizer, changed)
    update = MixedPrecisionOptimizer(optimizer, shards, recipe, ranks, options, masters, device)
    for name, tensor in named_tensors(model):
        if name in came:
            update.master_weights.originals.add(tensor, came.pop(name))  # one by one: the host may be another memory
    hooks = list(watch_state(model, update.master_weights, changed))
    update.on_close = lambda: take_back(model, update, dtypes, hooks)
    return update


def take_back(
    model: nn.Module,
    update: MixedPrecisionOptimizer,
    dtypes: Mapping[str, torch.dtype],
    hooks: Sequence[RemovableHandle],
) -> None:
    """Give the model what it came with, trained: the masters' values, and full precision of the rest; the optimizer its
    parameters."""
    for hook in hooks:
        hook.remove()
    masters, changed = update.master_weights.masters, {}
    for shard in update.master_weights.shards:
        if shard.source is not None and shard.param in masters:  # whoever has all parts brings them together
            value = current_value(shard.param, masters[shard.param])
            shard.param.data = value.to(dtypes.get(shard.name, value.dtype))
            reset_grad(shard.param)
    for name, tensor in named_tensors(model):
        dtype, full = dtypes.get(name, tensor.dtype), update.master_weights.full_value(tensor)
        if full is not None:
            tensor.data = full.to(dtype)
            reset_grad(tensor)
        elif tensor.dtype != dtype:
            changed[tensor] = tensor.dtype
            tensor.data = tensor.data.to(dtype)
            reset_grad(tensor)
    cast_state(update.optimizer, changed)
    repoint(update.optimizer, {master: param for param, master in masters.items()})


def _not_trained(
    model: nn.Module, optimizer: optim.Optimizer, shards: Sequence[ParamShard], recipe: Recipe, apart: Collection[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What will be cast and is not in the optimizer, as it is now."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trained = {id(shard.model_param) for shard in shards if id(shard.param) in held}
    for name, tensor in tensors_to_cast(model, recipe, apart) if recipe.param_dtype is not None else ():
        if id(tensor) not in trained:
            yield name, tensor.detach()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and buffers under each of their names."""
    yield from model.named_parameters()
    yield from model.named_buffers(remove_duplicate=False)
