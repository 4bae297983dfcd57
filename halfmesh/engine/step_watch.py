"""Notices a loop that counts its batches itself, beside `gradient_accumulation`."""

from __future__ import annotations

from typing import Any

from ..log import get_logger
from .dataloader import EngineDataLoader

_log = get_logger(__name__)


class StepWatch:
    """Warns once at the second `step` that came after more than one batch.

    Batches are those that `engine.dataloader` gave, of which several losses may come. Where it is not iterated, a
    training forward with a backward after it counts as one.

    Args:
        accumulation: the config's, above 1.
    """

    def __init__(self, accumulation: int, loader: EngineDataLoader | None) -> None:
        self._accumulation = accumulation
        self._loader = loader
        self._call: Any = None
        self._batches = self._late = 0

    def before_backward(self, call: Any) -> None:
        """Count its batch. `call` is what the last training forward was given, another object for each forward."""
        loader = self._loader
        if loader is not None and loader.runs:
            self._batches += loader.is_untouched
        else:
            self._batches += call is not self._call
        self._call = call

    def before_step(self) -> None:
        """What follows belongs to the next step."""
        batches, self._batches = self._batches, 0
        if batches > 1:
            self._late += 1
            if self._late == 2:
                self._warn(batches)

    def _warn(self, batches: int) -> None:
        _log.warning(
            "engine.step() came after %d batches, twice by now, but with gradient_accumulation=%d it counts them "
            "itself: each call stands for one batch, and every %d calls, or step(last=True), end an update. So updates "
            "are made of more batches than they are divided by. Delete the `if` around engine.step() and call it for "
            "each batch; or set gradient_accumulation=1 and divide the loss by %d yourself",
            batches,
            self._accumulation,
            self._accumulation,
            batches,
        )
