"""Layers of which each rank of a tensor group holds a part. They take the place of a layer's class, in place.

The layer keeps its parameters (now this rank's part), hooks and name; `TensorParallel.close` gives its class back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..._torch import edit_stamp, in_shapes_only
from ...errors import InputError
from ..rng import CommonRandom, RandomFork
from . import collectives

SEQUENCE_DIM = 1
"""The dimension of activations along which sequence parallelism divides them: [batch, sequence, ...]."""


class TensorAxis:
    """The ranks that hold the parts of one layer: how to reach them, and how random numbers part and meet again.

    One for each engine; all of its divided layers share it, copies of them too.

    Attributes:
        group: the ranks, `size` of them, of which this is number `rank`.
        device: this rank's.
        common: the random numbers of the model's forward.
        fork: differing ones, open where activations are divided.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, common: CommonRandom | None = None) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.size = group.size()
        self.common = common or CommonRandom(0, device)
        self.fork = RandomFork(self.rank, device)
        self._copied: tuple[Any, ...] | None = None

    @torch.compiler.disable
    def copy_to_tp(self, x: torch.Tensor) -> torch.Tensor:
        """`x` for layers that each give part of its gradient. Those that share an input (q, k, v) share the sum."""
        if not (x.requires_grad and torch.is_grad_enabled()) or in_shapes_only():
            return x
        stamp = edit_stamp(x)
        if self._copied is None or self._copied[0] is not x or self._copied[1] != stamp:
            self._copied = x, stamp, collectives.copy_to_tp(x, self.group)
        return self._copied[2]

    @torch.compiler.disable
    def end_tp_region(self, *_: Any) -> None:
        """A divided computation ends: random numbers are in common again, and its input is forgotten.

        Takes what a forward hook is given.
        """
        self.fork.close()
        self._copied = None

    def gathered(self, part: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all ranks, in order of rank. Without gradients."""
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return parts

    def __deepcopy__(self, memo: Any) -> TensorAxis:
        return self

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a model that is divided over a tensor group cannot be pickled; save engine.state_dict(), or call "
            "engine.close(restore=True) first, which gives the whole model back"
        )


class DividedLayer(nn.Module):
    """What all of them know.

    Attributes:
        axis: the ranks that hold the parts.
        in_region: whether a layer around this one gathers and sums for it, along the sequence (sequence parallelism).
        product: of a linear layer; a precision may set another one for a layer.
    """

    is_divided_by_engine = True
    axis: TensorAxis
    in_region: bool
    product: Callable[..., torch.Tensor] = staticmethod(F.linear)


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
    output = layer.product(x if layer.in_region else layer.axis.copy_to_tp(x), weight, layer.bias)
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
    layer.axis.end_tp_region()
    group, features = layer.axis.group, weight.shape[1]
    x = collectives.split(x, -1, group) if layer.splits else x
    if x.shape[-1] != features:
        raise InputError(
            f"a 'rowwise' layer takes this rank's {features} features, but {x.shape[-1]} came; give the layer before "
            "it the style 'colwise', or this one 'rowwise_split' if its input is whole"
        )
    output = layer.product(x, weight)
    if layer.in_region:
        output = collectives.reduce_scatter_sequence(output, SEQUENCE_DIM, group)
    else:
        output = collectives.reduce_from_tp(output, group)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class VocabEmbedding(DividedLayer, nn.Embedding):
    """An embedding of which this rank holds part of the vocabulary. Other ids give zero here, and summed up."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        entries, rank, size = self.weight.shape[0], self.axis.rank, self.axis.size
        local = ids - rank * entries
        # Ids that no rank has stay outside, and fail on all ranks as in one process.
        elsewhere = (ids >= 0) & (ids < entries * size) & ((local < 0) | (local >= entries))
        padding = None if self.padding_idx is None else self.padding_idx - rank * entries
        padding = padding if padding is not None and 0 <= padding < entries else None
        output = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        return collectives.reduce_from_tp(output.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis.group)
