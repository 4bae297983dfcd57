"""How a tensor is divided among the ranks of the tensor axis, and how the parts make the whole again."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Split:
    """A tensor in equal parts along `dim`; each of `blocks` blocks is divided by itself.

    A fused q, k, v weight of shape [3 * d, d] has three blocks: rank r holds its rows of q, then of k, then of v.
    """

    dim: int = 0
    blocks: int = 1

    def cut(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Part `rank` of `size`, in memory of its own."""
        parts = whole.unflatten(self.dim, (self.blocks, -1)).chunk(size, self.dim + 1)
        return parts[rank].flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def whole_shape(self, part: torch.Size, size: int) -> torch.Size:
        """The shape of the whole, from that of one of `size` parts."""
        return torch.Size(n * size if dim == self.dim else n for dim, n in enumerate(part))

    def __str__(self) -> str:
        return f"dim {self.dim}" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")
