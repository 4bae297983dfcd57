"""Apply a recipe to a model and its optimizer, and take it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn, optim

from ..shard import ParamShard, Ranks
from .cast import cast_model
from .master_weights import current_value, masters_for, repoint
from .optimizer import MixedPrecisionOptimizer
from .recipe import Recipe
from .rules import UpdateRules


def convert(
    model: nn.Module,
    optimizer: optim.Optimizer,
    shards: Sequence[ParamShard],
    recipe: Recipe,
    ranks: Ranks | None = None,
    rules: UpdateRules | None = None,
) -> MixedPrecisionOptimizer:
    """Cast `model` in place and re-point `optimizer` to fp32 masters where the recipe keeps them.

    Masters are taken before the cast, from the full precision that the model came with; they take over its memory.
    `close` of what is returned undoes the conversion.
    """
    masters = masters_for(optimizer, shards, {}) if recipe.master_weights else {}
    dtypes = {name: tensor.dtype for name, tensor in _tensors(model)}
    cast_model(model, recipe)
    update = MixedPrecisionOptimizer(optimizer, shards, recipe, ranks, rules, masters)
    update.on_close = lambda: _take_back(model, update, dtypes)
    return update


def _take_back(model: nn.Module, update: MixedPrecisionOptimizer, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give the model the dtypes it came with and the masters' values; the optimizer its parameters."""
    masters = update.holdings.masters
    for name, tensor in _tensors(model):
        dtype = dtypes.get(name, tensor.dtype)
        if isinstance(tensor, nn.Parameter) and tensor in masters:
            tensor.data, tensor.grad = current_value(tensor, masters[tensor]).to(dtype), None
        elif tensor.dtype != dtype:
            tensor.data, tensor.grad = tensor.data.to(dtype), None
    repoint(update.optimizer, {master: param for param, master in masters.items()})


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
