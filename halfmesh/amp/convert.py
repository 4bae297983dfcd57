"""Apply a recipe to a model and its optimizer, and take it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import nn, optim

from ..shard import ParamShard, Ranks
from .cast import cast_model
from .master_weights import current_value, make_master, repoint
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
    masters: dict[nn.Parameter, nn.Parameter] = {}
    if recipe.master_weights:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        masters = {shard.param: make_master(shard.param) for shard in shards if id(shard.param) in held}
    restore = _remember_dtypes(model)
    cast_model(model, recipe)
    update = MixedPrecisionOptimizer(optimizer, shards, recipe, ranks, rules, masters)
    update.on_close = lambda: _take_back(update, restore)
    return update


def _take_back(update: MixedPrecisionOptimizer, restore: Callable[[], None]) -> None:
    """Give the model the dtypes it came with and the masters' values; the optimizer its parameters."""
    masters = update.holdings.masters
    values = {param: current_value(param, master) for param, master in masters.items()}
    restore()
    for param, value in values.items():
        param.data = value.to(param.dtype)
    repoint(update.optimizer, {master: param for param, master in masters.items()})


def _remember_dtypes(model: nn.Module) -> Callable[[], None]:
    """A function that casts parameters and buffers back to the dtypes that they have now."""
    dtypes = {name: t.dtype for name, t in chain(model.named_parameters(), model.named_buffers())}

    def restore() -> None:
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if tensor.dtype != (dtype := dtypes.get(name, tensor.dtype)):
                tensor.grad = None
                tensor.data = tensor.data.to(dtype)

    return restore
