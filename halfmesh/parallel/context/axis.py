"""`parallel.context` as an axis of the mesh: its keys and its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...errors import shorten
from ...options import Names, Options, PositiveInt
from ...utils.tensors import parameter_names
from ...utils.torch_private import RUNNING_STATISTICS
from ..axis import Axis, AxisInputs, PlanInputs
from ..models.transformers import find_context_problem
from .calls import CallPlan, ContextParallel

_POSITIONS = ("position_ids", "positions")
_MIXES_TOKENS = (*RUNNING_STATISTICS, nn.RNNBase)


class ContextOptions(Options):
    """`parallel = dict(context=2)`, or `dict(context=dict(size=2, non_split=("bias",)))`."""

    size: PositiveInt = 1
    """The number of ranks over which each sequence is sharded."""
    non_split: Names = ("attention_mask", "key_padding_mask", "src_key_padding_mask", "attn_mask", "mask")
    """Arguments of the model that every rank gets unsharded: masks, which attention needs for all tokens."""


class ContextParallelism(Axis):
    """`parallel.context`."""

    dim = "cp"
    options = ContextOptions
    splits_params = False
    same_rng = False
    cost = "attention exchanges heads for tokens, four times a layer, and gradients are summed over the group, too"

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        if config.compile.enabled:
            message = "attention waits for other ranks, which compiled code would not; leave compile out, or context"
            yield "compile", message

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[CallPlan | None, list[str]]:
        model, names = inputs.model, parameter_names(inputs.model)
        problems = list(_find_problems(model))
        positions = next((name for name in _POSITIONS if name in names), None)
        if positions is None:
            problems.append(
                f"parallel.context: {type(model).__name__}.forward has no argument position_ids, so each rank would "
                "count the positions of its tokens from 0; add one (int64 [batch, sequence], by default None), and use "
                "it for embeddings or rotations of positions. halfmesh passes it"
            )
            return None, problems
        return CallPlan(names, positions, inputs.options.non_split), problems

    @staticmethod
    def apply(inputs: AxisInputs) -> ContextParallel:
        return ContextParallel(inputs, ContextParallelism.dim)


def _find_problems(model: nn.Module) -> Iterator[str]:
    mixing = [name for name, module in model.named_modules() if isinstance(module, _MIXES_TOKENS)]
    if mixing:
        yield (
            f"parallel.context: {shorten(mixing)} combine(s) the tokens of a sequence other than by attention "
            "(BatchNorm, InstanceNorm, RNN), and a rank has some of them only; leave context out"
        )
    problem = find_context_problem(model)
    if problem is not None:
        yield f"parallel.context: {problem}"
