"""The sizes of the mesh's axes, which determine each rank's coordinates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..distributed.env import RankNames
from ..errors import InputError


@dataclass(frozen=True)
class ParallelDims:
    """The axes of the mesh of `world_size` ranks, from a config.

    `ParallelConfig.dims` makes one. Functions that need a size or a coordinate take it as an argument. Arguments `axes`
    take names of `sizes` and of sub-axes, in any order. Their ranks have the order of the mesh.

    Attributes:
        sizes: the sizes by axis, outermost first: pp, dp, others, tp. The coordinate on tp changes fastest.
        views: the sizes of sub-axes, by the axis that was split; see `split`.
        grad_axes: dp, and the axes whose ranks have parts of a data rank's batch: gradients are averaged over them.
    """

    world_size: int
    sizes: Mapping[str, int]
    views: tuple[tuple[str, Mapping[str, int]], ...] = ()
    grad_axes: tuple[str, ...] = ("dp",)

    @property
    def grad_ranks(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return math.prod(self.sizes[axis] for axis in self.grad_axes)

    @property
    def pp(self) -> int:
        """The number of pipeline stages."""
        return self.sizes["pp"]

    @property
    def dp(self) -> int:
        """The number of data ranks; at least 1, also where the sizes do not fit the number of ranks."""
        return self.sizes["dp"]

    @property
    def tp(self) -> int:
        """The number of tensor ranks."""
        return self.sizes["tp"]

    @property
    def rank_names(self) -> RankNames:
        """The names of ranks in messages."""
        return RankNames(self.world_size, self.sizes)

    def split(self, axis: str, sizes: Mapping[str, int]) -> ParallelDims:
        """These dims, in which `axis` can also be seen as sub-axes, the last of which changes fastest: dp=8 as
        {"edp": 2, "ep": 4}. They are no axes of the mesh; an axis may be split in several ways.

        Raises:
            InputError: the sizes do not multiply to that of the axis.
        """
        view = axis, dict(sizes)
        if view in self.views:
            return self
        if math.prod(sizes.values()) != (size := len(self.row(0, axis))):
            raise InputError(f"{axis} has {size} ranks, which cannot be split into {in_words(sizes)}")
        return replace(self, views=(*self.views, view))

    def row(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` in their coordinates on `axes` only."""
        digits = self._chosen(axes)
        first = rank - sum(rank // stride % size * stride for size, stride in digits)
        steps = (range(0, size * stride, stride) for size, stride in digits)
        return [first + sum(step) for step in itertools.product(*steps)]

    def rows(self, *axes: str) -> list[list[int]]:
        """All ranks, in rows as of `row`."""
        return [row for rank in range(self.world_size) if (row := self.row(rank, *axes))[0] == rank]

    @cached_property
    def _digits(self) -> dict[str, tuple[int, int]]:
        """The size of each axis and sub-axis, and the distance of neighbours on it: coordinates are digits of ranks."""
        digits: dict[str, tuple[int, int]] = {}
        for axis, sizes in (("", self.sizes), *self.views):
            stride = digits[axis][1] if axis else 1
            for name, size in reversed(list(sizes.items())):
                digits[name] = size, stride
                stride *= size
        return digits

    def _chosen(self, axes: Collection[str]) -> list[tuple[int, int]]:
        """The digits of `axes`, outermost first; those of size 1 are left out."""
        for axis in axes:
            if axis not in self._digits:
                raise InputError(f"axis={axis!r} is not an axis of the mesh: {', '.join(self._digits)}")
        digits = [self._digits[axis] for axis in axes if self._digits[axis][0] > 1]
        chosen = sorted(digits, key=lambda digit: -digit[1])
        if any(outer % (size * stride) for (_, outer), (size, stride) in itertools.pairwise(chosen)):
            raise InputError(f"{' and '.join(axes)} share coordinates; combine axes that do not")
        return chosen


def in_words(sizes: Mapping[str, int], views: Iterable[tuple[str, Mapping[str, int]]] = ()) -> str:
    """For example "pp 2 x dp 4 x tp 1"; with `ParallelDims.views` "pp 2 x dp 4 (edp 2 x ep 2) x tp 1"."""
    seen_as = {axis: f" ({in_words(parts)})" for axis, parts in views}
    return " x ".join(f"{axis} {size}{seen_as.get(axis, '')}" for axis, size in sizes.items())
