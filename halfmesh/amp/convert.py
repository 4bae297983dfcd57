"""Apply a recipe to a model and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn, optim

from ..shard import ParamShard, Ranks
from .cast import cast_model
from .master_weights import make_master
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
    """
    masters: dict[nn.Parameter, nn.Parameter] = {}
    if recipe.master_weights:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        masters = {shard.param: make_master(shard.param) for shard in shards if id(shard.param) in held}
    cast_model(model, recipe)
    return MixedPrecisionOptimizer(optimizer, shards, recipe, ranks, rules, masters)
