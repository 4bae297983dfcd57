"""Reductions of gradients: one for shared parameters, and several in sequence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch.distributed as dist
from torch import nn

from ..utils.param_shard import ParamShard
from .reducer import ReduceOptions, Reducer


class SharedGradients(Reducer):
    """Sums the gradients of `params` over the ranks of `group`. Each replicates these parameters and has a partial
    gradient. One all-reduce in fp32 per update.

    Args:
        shards: of the parameters that are trained.
        mean: divide the sum by the number of ranks.
    """

    def __init__(
        self,
        params: Collection[nn.Parameter],
        group: dist.ProcessGroup,
        shards: Sequence[ParamShard],
        mean: bool = False,
    ) -> None:
        self._params = params
        super().__init__(shards, {}, group, ReduceOptions(mean=mean))

    def open(self, last: bool) -> None:
        super().open(last=False)  # nothing is sent before the data ranks have their sums

    def begin_last_backward(self, params: Collection[nn.Parameter]) -> None:
        """Do nothing: nothing is sent before `finish`."""

    def _takes_part(self, shard: ParamShard) -> bool:
        return shard.model_param in self._params and super()._takes_part(shard)


class CompleteGradients:
    """Several reductions, one after the other."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._reductions = list(reductions)

    @property
    def is_complete(self) -> bool:
        """See `Reducer`."""
        return all(reduction.is_complete for reduction in self._reductions)

    def cover(self, shards: Sequence[ParamShard]) -> None:
        self._each(lambda reduction: reduction.cover(shards))

    def open(self, last: bool) -> None:
        self._each(lambda reduction: reduction.open(last))

    def expect_last(self, params: Collection[nn.Parameter]) -> None:
        self._each(lambda reduction: reduction.expect_last(params))

    def begin_last_backward(self, params: Collection[nn.Parameter]) -> None:
        self._each(lambda reduction: reduction.begin_last_backward(params))

    def finish(self) -> None:
        self._each(lambda reduction: reduction.finish())

    def forget(self) -> None:
        self._each(lambda reduction: reduction.forget())

    def close(self) -> None:
        self._each(lambda reduction: reduction.close())

    def _each(self, call: Callable[[Reduction], None]) -> None:
        for reduction in self._reductions:
            call(reduction)


Reduction = Reducer | CompleteGradients
