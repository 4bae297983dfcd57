"""What a reduction of gradients is, and several of them, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from torch import nn

from ..shard import ParamShard


class Reduction(Protocol):
    """One reduction of gradients, as `Reducer` does it over the data ranks."""

    @property
    def stale(self) -> bool: ...

    def cover(self, shards: Sequence[ParamShard]) -> None: ...
    def covers(self, shards: Sequence[ParamShard]) -> bool: ...
    def open(self, last: bool) -> None: ...
    def expect_last(self, params: Collection[nn.Parameter]) -> None: ...
    def expect_rest(self, params: Collection[nn.Parameter]) -> None: ...
    def finish(self) -> None: ...
    def forget(self) -> None: ...
    def note_buffers(self) -> None: ...
    def close(self) -> None: ...


class CompleteGradients:
    """All reductions that gradients need, one after the other; itself one."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._reductions = list(reductions)

    @property
    def stale(self) -> bool:
        """Whether gradients arrived since `finish`."""
        return any(reduction.stale for reduction in self._reductions)

    def cover(self, shards: Sequence[ParamShard]) -> None:
        """Take part with these shards from now on."""
        self._each(lambda reduction: reduction.cover(shards))

    def covers(self, shards: Sequence[ParamShard]) -> bool:
        """Whether all that `cover` would choose now take part."""
        return all(reduction.covers(shards) for reduction in self._reductions)

    def open(self, last: bool) -> None:
        """A backward begins; `last`: it is the last before the update."""
        self._each(lambda reduction: reduction.open(last))

    def expect_last(self, params: Collection[nn.Parameter]) -> None:
        """Of several backwards after one `open` the last begins that gives gradients to `params`."""
        self._each(lambda reduction: reduction.expect_last(params))

    def expect_rest(self, params: Collection[nn.Parameter]) -> None:
        """Of several backwards after one `open` the last begins, which gives gradients to `params` only."""
        self._each(lambda reduction: reduction.expect_rest(params))

    def finish(self) -> None:
        """Complete the gradients."""
        self._each(lambda reduction: reduction.finish())

    def forget(self) -> None:
        """The gradients were used or cleared."""
        self._each(lambda reduction: reduction.forget())

    def note_buffers(self) -> None:
        """What the buffers hold now was not put there by training."""
        self._each(lambda reduction: reduction.note_buffers())

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._each(lambda reduction: reduction.close())

    def _each(self, call: Callable[[Reduction], None]) -> None:
        for reduction in self._reductions:
            call(reduction)
