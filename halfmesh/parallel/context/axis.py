"""The axis `context`: each rank computes its tokens of every sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError, shorten
from ...options import Names, Options, PositiveInt
from ...utils.tensors import parameter_names
from ...utils.torch_private import RUNNING_STATISTICS
from ..axis import Axis, AxisInputs, PlanInputs
from ..batch_shard.calls import SplitBatch
from ..batch_shard.shard import TOKENS, BatchShard
from ..models.transformers import find_context_problem, whole_sequence_arguments
from .attention import attend


@dataclass(frozen=True)
class CallPlan:
    """The plan that shards calls of a model.

    Attributes:
        names: of the arguments of its forward.
        positions: the argument that takes the positions of tokens.
        non_split: the arguments that every rank gets unsharded.
    """

    names: Sequence[str]
    positions: str
    non_split: Sequence[str]


class ContextParallel(SplitBatch):
    """A model that each rank calls with its tokens of every sequence. It holds all parameters."""

    key = "context"
    sharded_dim = TOKENS
    advice = (
        "Tokens may only be combined by torch.nn.functional.scaled_dot_product_attention, and positions only be taken "
        "from the argument position_ids (or positions; pass it if they do not count from 0): no convolution, mean or "
        "shift along the sequence, no arange(length). Shift targets of whole sequences before the call: "
        "F.pad(ids, (0, 1), value=-100)[:, 1:]"
    )
    functions = MappingProxyType({F.scaled_dot_product_attention: attend})

    def __init__(self, inputs: AxisInputs, dim: str) -> None:
        super().__init__(inputs, dim, inputs.plan.names)
        self._positions = inputs.plan.positions
        self._device = inputs.context.device
        self.non_split = inputs.plan.non_split

    def prepare(self, model: nn.Module, given: dict[str, Any], shard: BatchShard) -> dict[str, Any]:
        given = whole_sequence_arguments(model, given)
        if given.get(self._positions) is None:
            given[self._positions] = torch.arange(shard.whole, device=self._device).expand(shard.rows, -1)
        return given

    def check_functions(self, called: Collection[Any]) -> None:
        if not (self.has_stages or F.scaled_dot_product_attention in called):  # a stage may have none
            raise InputError(
                "the model computes its attention without torch's scaled_dot_product_attention, which parallel.context "
                "shards: each rank would attend to its own tokens only. Use "
                "torch.nn.functional.scaled_dot_product_attention (need_weights=False in nn.MultiheadAttention)"
            )

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        return {"layout": f"1/{self.size} of the tokens of each sequence"}


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
            f"parallel.context: the tokens of a sequence are combined other than by attention in {shorten(mixing)} "
            "(BatchNorm, InstanceNorm, RNN), and a rank has some of them only; leave context out"
        )
    problem = find_context_problem(model)
    if problem is not None:
        yield f"parallel.context: {problem}"
