"""One number of the evaluation's results, by which a hook decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from ..errors import InputError, did_you_mean


class Monitor:
    """The best value so far of one result. It is not saved with a run.

    Args:
        name: of a result of evaluation, "eval_loss".
        mode: whether less or more is better.
        min_delta: what a value has to be better by to count.
    """

    def __init__(self, name: str, mode: Literal["min", "max"], min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise InputError(f"mode={mode!r}: expected 'min' (less is better) or 'max'")
        self.name, self._sign, self._min_delta = name, 1 if mode == "min" else -1, min_delta
        self.best = self.worst = math.inf * self._sign

    def read(self, results: Mapping[str, float]) -> float:
        """The value. Raises InputError if there is none of that name."""
        if self.name not in results:
            raise InputError(
                f"monitor={self.name!r}: evaluation gave {', '.join(results) or 'nothing'}"
                f"{did_you_mean(self.name, results)}"
            )
        return results[self.name]

    def improves(self, results: Mapping[str, float]) -> bool:
        """Whether this is the best so far; nan is not."""
        value = self.read(results)
        if not self._sign * value < self._sign * self.best - self._min_delta:
            return False
        self.best = value
        return True
