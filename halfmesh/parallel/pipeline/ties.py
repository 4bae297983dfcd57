"""Gradients of parameters that several stages use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from ...shard import ParamShard
from ..reducer import ReduceOptions, Reducer


class TiedGradients:
    """Sums the gradients of each parameter that several pipeline ranks hold over these ranks, so that their copies stay
    equal. One all-reduce in fp32 for each set of ranks and update. A `halfmesh.parallel.gradient_sums.Reduction`.

    Args:
        ties: this rank's parameters that others hold, too, with all holders.
        groups: the process group of each set of holders.
        shards: of the parameters that are trained.
    """

    def __init__(
        self,
        ties: Mapping[nn.Parameter, Sequence[int]],
        groups: Mapping[tuple[int, ...], dist.ProcessGroup | None],
        shards: Sequence[ParamShard],
    ) -> None:
        self._ties = ties
        options = ReduceOptions(mean=False)
        self._reducers = {
            ranks: Reducer(self._of(ranks, shards), {}, group, options)
            for ranks, group in groups.items()
            if group is not None
        }

    @property
    def stale(self) -> bool:
        return any(reducer.stale for reducer in self._reducers.values())

    def cover(self, shards: Sequence[ParamShard]) -> None:
        for ranks, reducer in self._reducers.items():
            reducer.cover(self._of(ranks, shards))

    def covers(self, shards: Sequence[ParamShard]) -> bool:
        return all(reducer.covers(self._of(ranks, shards)) for ranks, reducer in self._reducers.items())

    def open(self, last: bool) -> None:
        for reducer in self._reducers.values():
            reducer.open(last=False)  # the sum may be sent when the data ranks have theirs, not before

    def expect_last(self, params: Collection[nn.Parameter]) -> None:
        """Nothing is sent before `finish`."""

    expect_rest = expect_last

    def finish(self) -> None:
        for reducer in self._reducers.values():
            reducer.finish()

    def forget(self) -> None:
        for reducer in self._reducers.values():
            reducer.forget()

    def note_buffers(self) -> None:
        """It looks at none."""

    def close(self) -> None:
        for reducer in self._reducers.values():
            reducer.close()

    def _of(self, ranks: tuple[int, ...], shards: Sequence[ParamShard]) -> list[ParamShard]:
        return [shard for shard in shards if tuple(self._ties.get(shard.model_param, ())) == ranks]
