"""How messages name a rank: by its number, and by its place in the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The mesh (pp, dp, tp), tp fastest: rank = (pp_rank * dp_size + dp_rank) * tp_size + tp_rank.

    Numbers that do not fit together are not an error here, where only names are made.
    """

    world_size: int
    pipeline: int = 1
    tensor: int = 1

    @property
    def has_places(self) -> bool:
        """Whether a rank has a place besides its number. Where there is data parallelism only, the two are the same."""
        degree = self.pipeline * self.tensor
        return degree > 1 and self.world_size % degree == 0

    def name(self, rank: int) -> str:
        """`rank 3`, or `rank 3 (dp 1, tp 1)`; axes of size 1 are left out."""
        if not self.has_places:
            return f"rank {rank}"
        data = self.world_size // (self.pipeline * self.tensor)
        places = (
            ("pp", rank // (data * self.tensor), self.pipeline),
            ("dp", rank // self.tensor % data, data),
            ("tp", rank % self.tensor, self.tensor),
        )
        return f"rank {rank} ({', '.join(f'{axis} {place}' for axis, place, size in places if size > 1)})"

    def names(self, ranks: Iterable[int]) -> str:
        """Several ranks, in order."""
        return ", ".join(self.name(rank) for rank in sorted(ranks))
