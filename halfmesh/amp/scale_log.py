"""Tells of changes of the loss scale, some updates late on a GPU rather than holding it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ..log import get_logger
from .host_copy import HostCopy, is_captured

_log = get_logger(__name__)


class ScaleLog:
    """Logs each change of the loss scales once it is known on the host."""

    def __init__(self, scales: Sequence[torch.Tensor], engine: str | None = None) -> None:
        """`scales`: those before the first update (0-dim, one per loss); `engine`: its name, if it has one."""
        self._prefix = "" if engine is None else f"{engine}: "
        self._pending: deque[HostCopy] = deque()
        self._last: list[float] = []
        self.note(scales)

    def note(self, scales: Sequence[torch.Tensor]) -> None:
        """The scales after an update. Logs what has arrived so far. (Nothing of the replays of a CUDA graph.)"""
        if is_captured(scales[0].device):
            return
        self._pending.append(HostCopy([scale.clone() for scale in scales]))  # scalers change theirs in place
        while self._pending and self._pending[0].arrived:
            self._tell(self._pending.popleft().read())

    def _tell(self, scales: list[float]) -> None:
        before, self._last = self._last or scales, scales
        for loss_id, (old, new) in enumerate(zip(before, scales, strict=True)):
            if old != new:
                which = f" of loss {loss_id}" if len(scales) > 1 else ""
                why = "; gradients with inf or nan" if new < old else ""
                _log.info("%sloss scale%s %g -> %g%s", self._prefix, which, old, new, why)
