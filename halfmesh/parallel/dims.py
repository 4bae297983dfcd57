"""The sizes of the mesh, from which ranks get their coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..distributed.env import RankNames, coordinates_of


@dataclass(frozen=True)
class ParallelDims:
    """The axes of the mesh that a config makes of `world_size` ranks.

    `ParallelConfig.dims` makes one; whoever needs a size or a coordinate is given it.

    Attributes:
        sizes: by axis, outermost first: pp, dp, others, tp, whose coordinate changes fastest.
    """

    world_size: int
    sizes: Mapping[str, int]

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

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis."""
        return coordinates_of(rank, self.sizes)


def in_words(sizes: Mapping[str, int]) -> str:
    """For example "pp 2 x dp 4 x tp 1"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())
