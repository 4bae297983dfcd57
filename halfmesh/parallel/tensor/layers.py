"""Layers of which each rank of a tensor group holds a part. They take the place of a layer's class, in place.

The layer keeps its parameters (now this rank's part), hooks and name; `TensorParallel.close` gives its class back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError
from . import collectives
from .axis import TensorAxis

SEQUENCE_DIM = 1
"""The dimension of activations along which sequence parallelism divides them: [batch, sequence, ...]."""


class DividedLayer(nn.Module):
    """What all of them know.

    Attributes:
        axis: the ranks that hold the parts.
        in_region: whether a layer around this one gathers and sums for it, along the sequence (sequence parallelism).
    """

    is_divided_by_engine = True
    axis: TensorAxis
    in_region: bool


class ColwiseLinear(DividedLayer, nn.Linear):
    """A linear layer of which this rank computes some of the output's features: rows of the weight.

    Attributes:
        gathers: whether the output is made whole.
    """

    gathers: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _colwise(self, x, self.weight)


class ColwiseConv1D(DividedLayer):
    """The same of transformers' Conv1D, a linear layer whose weight is [in, out]."""

    gathers: bool
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _colwise(self, x, self.weight.t())


def _colwise(layer: ColwiseLinear | ColwiseConv1D, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    output = F.linear(x if layer.in_region else layer.axis.copy_in(x), weight, layer.bias)
    if layer.gathers:
        return collectives.gather(output, -1, layer.axis.group)
    if layer.training:
        layer.axis.fork.open()  # until the rowwise layer that follows, each rank drops features of its own
    return output


class RowwiseLinear(DividedLayer, nn.Linear):
    """A linear layer of which this rank has some of the input's features: columns of the weight. The outputs are
    summed over the ranks, then the bias, which every rank has whole, is added.

    Attributes:
        splits: whether the input is whole, and this rank takes its part of it.
    """

    splits: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rowwise(self, x, self.weight)


class RowwiseConv1D(DividedLayer):
    """The same of transformers' Conv1D, a linear layer whose weight is [in, out]."""

    splits: bool
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rowwise(self, x, self.weight.t())


def _rowwise(layer: RowwiseLinear | RowwiseConv1D, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    layer.axis.settle()
    group, features = layer.axis.group, weight.shape[1]
    x = collectives.split(x, -1, group) if layer.splits else x
    if x.shape[-1] != features:
        raise InputError(
            f"a 'rowwise' layer takes this rank's {features} features, but {x.shape[-1]} came; give the layer before "
            "it the style 'colwise', or this one 'rowwise_split' if its input is whole"
        )
    output = F.linear(x, weight)
    if layer.in_region:
        output = collectives.sum_and_split(output, SEQUENCE_DIM, group)
    else:
        output = collectives.sum_out(output, group)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class VocabEmbedding(DividedLayer, nn.Embedding):
    """An embedding of which this rank holds some of the words. Others' are zero here, and summed up."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words, rank, size = self.weight.shape[0], self.axis.rank, self.axis.size
        local = ids - rank * words
        # Ids that no rank has stay outside, and fail on all ranks as in one process.
        elsewhere = (ids >= 0) & (ids < words * size) & ((local < 0) | (local >= words))
        padding = None if self.padding_idx is None else self.padding_idx - rank * words
        padding = padding if padding is not None and 0 <= padding < words else None
        output = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        return collectives.sum_out(output.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis.group)
