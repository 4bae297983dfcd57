"""Memory for masters' gradients, which are there for a moment only: kept, because new memory costs more to fill."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..tensors import is_dense


class Staging:
    """One flat tensor, used by one part of an update after the other. As large as the largest part so far."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None

    def views(self, targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Pieces of the memory with the shapes and strides of `targets`, all of one dtype and device.

        Their values are any, and those of the views that were made before.
        """
        needed, like = sum(target.numel() for target in targets), targets[0]
        flat = self._flat
        if flat is None or flat.numel() < needed or (flat.dtype, flat.device) != (like.dtype, like.device):
            flat = self._flat = torch.empty(needed, dtype=like.dtype, device=like.device)
        pieces, offset = [], 0
        for target in targets:
            stride = target.stride() if is_dense(target) else torch.empty(target.shape, device="meta").stride()
            pieces.append(flat.as_strided(target.shape, stride, offset))
            offset += target.numel()
        return pieces
