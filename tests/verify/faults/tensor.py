"""Faults of tensor ranks: what each puts into the engine of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfmesh.parallel import collectives
from halfmesh.parallel.mesh import ParallelContext
from halfmesh.parallel.rng import ModelRNG
from halfmesh.parallel.tensor.apply import TensorGradients
from halfmesh.parallel.tensor.colwise import SEQUENCE_DIM, InputSums
from halfmesh.parallel.tensor.layers import RowwiseLinear, TensorAxis, VocabEmbedding
from halfmesh.parallel.tensor.styles import FusedColwise

from . import trains


def _rowwise(patch: pytest.MonkeyPatch, join: Any) -> None:
    """A layer divided by rows returns what `join` makes of its product, its bias and its group."""

    def forward(self: RowwiseLinear, x: torch.Tensor) -> torch.Tensor:
        self.axis.end_tp_region()
        x = collectives.split(x, -1, self.axis.group) if self.splits else x
        return join(self.product(x, self.weight), self.bias, self.axis.group)

    patch.setattr(RowwiseLinear, "forward", forward)


def _or_zero(bias: torch.Tensor | None) -> torch.Tensor | float:
    return 0.0 if bias is None else bias


def output_not_summed(patch: pytest.MonkeyPatch) -> None:
    """A layer divided by rows keeps its part of the output: an all-reduce is missing in forward."""
    _rowwise(patch, lambda x, bias, group: x + _or_zero(bias))


def output_summed_twice(patch: pytest.MonkeyPatch) -> None:
    """A layer divided by rows sums its output twice: an all-reduce too many in forward."""
    twice = lambda x, group: collectives.reduce_from_tp(collectives.reduce_from_tp(x, group), group)  # noqa: E731
    _rowwise(patch, lambda x, bias, group: twice(x, group) + _or_zero(bias))


def bias_before_the_sum(patch: pytest.MonkeyPatch) -> None:
    """Every rank adds the bias of a layer divided by rows, and then the ranks are summed."""
    _rowwise(patch, lambda x, bias, group: collectives.reduce_from_tp(x + _or_zero(bias), group))


def input_gradient_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Layers divided by columns hand back their part of the gradient: an all-reduce is missing in backward."""
    patch.setattr(collectives, "start_sum", lambda x, group: lambda: x)


def input_gradient_summed_twice(patch: pytest.MonkeyPatch) -> None:
    """Layers divided by columns sum the gradient of their input twice: an all-reduce too many in backward."""
    inner = collectives.start_sum
    patch.setattr(collectives, "start_sum", lambda x, group: inner(inner(x, group)(), group))


def gathered_in_other_order(patch: pytest.MonkeyPatch) -> None:
    """The shards of a head's output are joined in another order than that of the ranks."""
    inner = collectives.gather

    def gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        whole = inner(x, dim, group)
        return whole.roll(x.shape[dim], dim) if trains() else whole

    patch.setattr(collectives, "gather", gather)


def last_ranks_swapped(patch: pytest.MonkeyPatch) -> None:
    """Of four shards of a head's output the last two are joined in the wrong order."""
    inner = collectives.gather

    def gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        shards = list(inner(x, dim, group).chunk(group.size(), dim))
        return torch.cat([*shards[:2], *shards[:1:-1]], dim)

    patch.setattr(collectives, "gather", gather)


def other_numbers_dropped(patch: pytest.MonkeyPatch) -> None:
    """Each rank of a tensor group drops other elements of activations that all of them hold."""
    inner = ModelRNG.__init__
    rank = dist.get_rank()
    patch.setattr(ModelRNG, "__init__", lambda self, seed, device: inner(self, seed + rank, device))


def border_word_twice(patch: pytest.MonkeyPatch) -> None:
    """Two ranks look up the last word of the first one's shard: the mask of an embedding is off by one."""
    inner = VocabEmbedding.forward

    def forward(self: VocabEmbedding, ids: torch.Tensor) -> torch.Tensor:
        return inner(self, ids) * (1 + (ids == len(self.weight) - 1)).unsqueeze(-1)

    patch.setattr(VocabEmbedding, "forward", forward)


def fused_weight_cut_as_one(patch: pytest.MonkeyPatch) -> None:
    """A weight of queries, keys and values is cut as if it were one matrix."""
    patch.setattr(FusedColwise, "__init__", lambda self, blocks: setattr(self, "blocks", 1))


def tied_gradient_dropped(patch: pytest.MonkeyPatch) -> None:
    """A weight that embedding and head share learns from the head only."""
    inner = VocabEmbedding.forward
    patch.setattr(VocabEmbedding, "forward", lambda self, ids: inner(self, ids).detach())


def partial_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Gradients from this rank's shard of the activations are left as they are."""
    patch.setattr(TensorGradients, "finish", lambda self: None)


def partial_summed_twice(patch: pytest.MonkeyPatch) -> None:
    """Gradients from shards of the activations are summed over the ranks twice."""
    inner = TensorGradients.finish

    def finish(self: TensorGradients) -> None:
        inner(self)
        for shard in self._shards:
            shard.param.grad *= self.group.size()

    patch.setattr(TensorGradients, "finish", finish)


def sequence_gradient_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Where a sequence is gathered, backward takes this rank's part of the gradient, and not the sum."""
    inner = InputSums.begin_sum

    def begin_sum(self: InputSums, grad: torch.Tensor) -> torch.Tensor:
        mine = grad.chunk(dist.get_world_size(), SEQUENCE_DIM)[dist.get_rank()].clone()
        self._sums.append(lambda: mine) if self.gathers else inner(self, grad)
        return grad.new_empty(0)

    patch.setattr(InputSums, "begin_sum", begin_sum)


def shard_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    """The sum of a layer divided by rows is scattered along the sequence to the wrong ranks."""
    inner = collectives.reduce_scatter_sequence

    def reduce_scatter(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        return inner(x.roll(x.shape[dim] // group.size(), dim) if trains() else x, dim, group)

    patch.setattr(collectives, "reduce_scatter_sequence", reduce_scatter)


def summed_over_the_data_ranks(patch: pytest.MonkeyPatch) -> None:
    """Sharded layers sum over the data ranks: a wrong group."""
    inner = TensorAxis.__init__

    def init(self: TensorAxis, context: ParallelContext) -> None:
        inner(self, context)
        self.group = context.dp_group

    patch.setattr(TensorAxis, "__init__", init)
