"""The hook "skip_rate": which part of the updates since the last record was skipped."""

from __future__ import annotations

import halfmesh


class SkipRateHook(halfmesh.Hook):
    """Adds "skip_rate" to the Trainer's records.

    Args:
        warn_above: a warning if it is larger.
    """

    def __init__(self, warn_above: float = 0.2) -> None:
        self.warn_above = warn_above
        self._seen = (0, 0)

    def before_fit(self, trainer: halfmesh.Trainer) -> None:
        self._seen = (trainer.engine.global_step, trainer.engine.skipped_steps)

    def measure(self, trainer: halfmesh.Trainer) -> dict[str, float]:
        """Both counts are the same on all ranks: no need to ask others."""
        now = (trainer.engine.global_step, trainer.engine.skipped_steps)
        updates, skipped = (new - old for new, old in zip(now, self._seen, strict=True))
        self._seen = now
        rate = skipped / updates if updates else 0.0
        if rate > self.warn_above:
            halfmesh.get_logger(__name__).warning("%d of the last %d updates were skipped", skipped, updates)
        return {"skip_rate": rate}
