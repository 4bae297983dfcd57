"""The axis `context`: each rank computes its tokens of every sequence, and attends to all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import shorten
from ...options import Names, Options, PositiveInt
from ...utils.tensors import parameter_names
from ...utils.torch_private import RUNNING_STATISTICS
from ..axis import Axis, AxisInputs, PlanInputs
from ..batch_shard.calls import SplitBatch
from ..batch_shard.shard import TOKENS, BatchShard
from ..models.transformers import find_context_problem, whole_sequence_arguments
from .attention import attend, attend_in_layer


def _attend(shard: BatchShard, *args: Any, **kwargs: Any) -> torch.Tensor:
    return attend(shard.group, *args, **kwargs)


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
    functions = MappingProxyType(
        {F.scaled_dot_product_attention: _attend, F.multi_head_attention_forward: attend_in_layer}
    )

    def __init__(self, inputs: AxisInputs) -> None:
        super().__init__(inputs, ContextParallelism.dim)
        self._positions, self.non_split = inputs.plan
        self._device = inputs.context.device

    def prepare(self, model: nn.Module, given: dict[str, Any], shard: BatchShard) -> dict[str, Any]:
        given = whole_sequence_arguments(model, given)
        if given.get(self._positions) is None:
            given[self._positions] = torch.arange(shard.full_size, device=self._device).expand(shard.rows, -1)
        return given

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
    splits_loss = True
    cost = "attention exchanges heads for tokens, four times a layer, and gradients are summed over the group, too"

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        if config.compile.enabled:
            message = "attention waits for other ranks, which compiled code would not; leave compile out, or context"
            yield "compile", message

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[Any, list[str]]:
        """The name of the argument that takes positions, and those that every rank gets unsharded."""
        model, names = inputs.model, parameter_names(inputs.model)
        problems = []
        if mixing := [name for name, module in model.named_modules() if isinstance(module, _MIXES_TOKENS)]:
            problems.append(
                f"parallel.context: the tokens of a sequence are combined other than by attention in "
                f"{shorten(mixing)} (BatchNorm, InstanceNorm, RNN), and a rank has some of them only; leave context out"
            )
        if problem := find_context_problem(model):
            problems.append(f"parallel.context: {problem}")
        positions = next((name for name in _POSITIONS if name in names), None)
        if positions is None:
            problems.append(
                f"parallel.context: {type(model).__name__}.forward has no argument position_ids, so each rank would "
                "count its tokens from 0; add one (int64 [batch, sequence]) for its embeddings; halfmesh passes it"
            )
        return (positions, inputs.options.non_split), problems

    @staticmethod
    def apply(inputs: AxisInputs) -> ContextParallel:
        return ContextParallel(inputs)
