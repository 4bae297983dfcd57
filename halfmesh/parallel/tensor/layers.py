"""Sharded layers, and the tensor axis that they share. A layer becomes a sharded one by a change of its class; its
parameters (now this rank's shards), hooks and name stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError
from ...utils.torch_private import edit_stamp
from .. import collectives
from ..axis import AppliedAxis
from ..mesh import ParallelContext
from ..rng import RandomFork

SEQUENCE_DIM = 1
"""The dimension of activations along which sequence parallelism shards them: [batch, sequence, ...]."""


class TensorAxis(AppliedAxis):
    """The tensor axis for its layers. All sharded layers of an engine share one, and so do copies of the model.

    Attributes:
        group: the `size` ranks, of which this is `rank`.
        device: this rank's.
        fork: random numbers that differ between the ranks, open where activations are sharded.
    """

    def __init__(self, context: ParallelContext) -> None:
        super().__init__(context, "tp", "tensor group")
        self.group = context.group("tp")
        self.device = context.device
        self.fork = RandomFork(self.rank, context.device)
        self._copied: tuple[Any, ...] | None = None

    @torch.compiler.disable
    def copy_to_tp(self, x: torch.Tensor) -> torch.Tensor:
        """`x` for layers that each give a partial gradient. Layers with the same input (q, k, v) share one sum."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        stamp = edit_stamp(x)
        if self._copied is None or self._copied[0] is not x or self._copied[1] != stamp:
            self._copied = x, stamp, collectives.copy_to_tp(x, self.group)
        return self._copied[2]

    @torch.compiler.disable
    def end_tp_region(self, *_: Any) -> None:
        """End a region of sharded activations: the ranks draw the same random numbers again, and the shared input is
        forgotten. Also a hook before or after a forward."""
        self.fork.close()
        self._copied = None


class ShardedLayer(nn.Module):
    """The base of sharded layers.

    Attributes:
        axis: the ranks that hold the shards.
        in_region: a module around this one gathers and reduces along the sequence (sequence parallelism).
        plan_entry: its name and style, for messages.
        product: computes a linear layer's product, as `torch.nn.functional.linear`; a precision may set another.
    """

    is_divided_by_engine = True
    axis: TensorAxis
    in_region: bool
    plan_entry: str
    product: Callable[..., torch.Tensor] = staticmethod(F.linear)


class ColwiseLinear(ShardedLayer, nn.Linear):
    """A linear layer of which this rank computes some output features: rows of the weight.

    Attributes:
        gathers: the output is gathered.
        transposed: the weight is [in, out], as in transformers' Conv1D.
    """

    gathers: bool
    transposed: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.in_region else self.axis.copy_to_tp(x)
        output = self.product(x, self.weight.t() if self.transposed else self.weight, self.bias)
        if self.gathers:
            return collectives.gather(output, -1, self.axis.group)
        if self.training:
            self.axis.fork.open()  # up to the rowwise layer that follows, each rank drops different features
        return output


class RowwiseLinear(ShardedLayer, nn.Linear):
    """A linear layer of which this rank has some input features: columns of the weight. Outputs are summed over the
    ranks, then the bias is added, which is replicated.

    Attributes:
        splits: the input is replicated, so that this rank takes its shard of it.
        transposed: the weight is [in, out], as in transformers' Conv1D.
    """

    splits: bool
    transposed: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.axis.end_tp_region()
        group, weight = self.axis.group, self.weight.t() if self.transposed else self.weight
        if self.splits:
            x = collectives.split(x, -1, group)
        if x.shape[-1] != weight.shape[1]:
            raise InputError(
                f"{self.plan_entry}: it takes this rank's {weight.shape[1]} features, but its input has {x.shape[-1]}; "
                "give the layer before it the style 'colwise', or this one 'rowwise_split' if its input is whole"
            )
        output = self.product(x, weight)
        if self.in_region:
            output = collectives.reduce_scatter_sequence(output, SEQUENCE_DIM, group)
        else:
            output = collectives.reduce_from_tp(output, group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class VocabEmbedding(ShardedLayer, nn.Embedding):
    """An embedding of which this rank holds some vocabulary entries. Ids of other ranks give zeros, and outputs are
    summed over the ranks."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        entries, rank, size = self.weight.shape[0], self.axis.rank, self.axis.size
        local = ids - rank * entries
        # Ids that no rank has stay out of range, and fail on all ranks as in one process.
        elsewhere = (ids >= 0) & (ids < entries * size) & ((local < 0) | (local >= entries))
        padding = None if self.padding_idx is None else self.padding_idx - rank * entries
        padding = padding if padding is not None and 0 <= padding < entries else None
        output = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        return collectives.reduce_from_tp(output.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis.group)
