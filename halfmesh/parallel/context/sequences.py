"""The tokens that a rank has of the sequences of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import collectives


@dataclass(frozen=True)
class Sequences:
    """Sequences of which each rank of a group has equally many consecutive tokens, in order of rank.

    Attributes:
        rows: the number of sequences.
        length: tokens of a whole sequence.
    """

    group: dist.ProcessGroup
    rows: int
    length: int

    @property
    def own(self) -> int:
        """This rank's tokens of each sequence."""
        return self.length // self.group.size()

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` has all tokens: [batch, sequence, ...]."""
        return tensor.dim() > 1 and tensor.shape[1] == self.length

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, contiguous (for `view(-1)`)."""
        return whole.narrow(1, self.group.rank() * self.own, self.own).contiguous()

    def cut_if_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of a tensor that has all; else `tensor`."""
        return self.cut(tensor) if self.is_whole(tensor) else tensor

    def join_if_own(self, tensor: torch.Tensor) -> torch.Tensor:
        """All tokens of a tensor that has this rank's; else `tensor`. What each rank computes of all gives each its
        tokens' part of the gradient, which is averaged over the ranks afterwards."""
        if tensor.dim() < 2 or tensor.shape[1] != self.own:
            return tensor
        return collectives.scale_gradient(collectives.gather(tensor, 1, self.group), self.group.size())
