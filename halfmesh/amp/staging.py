"""Memory for masters' gradients, which are there for a moment only: kept, because new memory costs more to fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..strides import is_dense


class Staging:
    """One flat tensor, used by one part of an update after the other. As large as the largest part so far."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None
        self._cut: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def views(self, targets: Sequence[torch.Tensor], part: int) -> list[torch.Tensor]:
        """Pieces of the memory with the shapes and strides of `targets`, all of one dtype and device.

        Their values are any. `part`: which part of an update this is; its pieces are remembered.
        """
        forms = list(map(id, targets)), list(map(torch.Tensor.stride, targets))
        known = self._cut.get(part)
        if known is not None and known[0] == forms:
            return known[1]
        needed, like = sum(target.numel() for target in targets), targets[0]
        flat = self._flat
        if flat is None or flat.numel() < needed or (flat.dtype, flat.device) != (like.dtype, like.device):
            flat = self._flat = torch.empty(needed, dtype=like.dtype, device=like.device)
            self._cut.clear()
        pieces, offset = [], 0
        for target in targets:
            stride = target.stride() if is_dense(target) else torch.empty(target.shape, device="meta").stride()
            pieces.append(flat.as_strided(target.shape, stride, offset))
            offset += target.numel()
        self._cut[part] = forms, pieces
        return pieces
