"""Calls of a model with this rank's tokens of every sequence: their positions, and masks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError
from ..axis import AxisInputs
from ..batch_shard.calls import SplitBatch
from ..batch_shard.shard import TOKENS, BatchShard
from ..models.transformers import whole_sequence_arguments
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
