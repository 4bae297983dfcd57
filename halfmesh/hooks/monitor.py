"""One number of the evaluation's results, by which a hook decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..errors import InputError, did_you_mean

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class Monitor:
    """The best value so far of one result.

    Args:
        name: of a result of evaluation, "eval_loss".
        mode: whether less or more is better.
        min_delta: what a value has to be better by to count.
    """

    def __init__(self, name: str, mode: Literal["min", "max"], min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise InputError(f"mode={mode!r}: expected 'min' (less is better) or 'max'")
        if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float)) or not min_delta >= 0:
            raise InputError(f"min_delta={min_delta!r}: expected a number, 0 or more")
        self.name, self.mode, self._sign, self._min_delta = name, mode, 1 if mode == "min" else -1, min_delta
        self.best = self.worst = math.inf * self._sign

    def state_dict(self) -> dict[str, Any]:
        """The best value, and of what."""
        return {"monitor": self.name, "mode": self.mode, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Returns whether `state` is of the same result; of another one nothing is taken."""
        is_same = (state["monitor"], state["mode"]) == (self.name, self.mode)
        if is_same:
            self.best = state["best"]
        return is_same

    def require(self, trainer: Trainer, hook: str) -> None:
        """Raise InputError if this `fit` evaluates nothing, so that there is never a result."""
        if not trainer.evaluates:
            raise InputError(
                f"{hook} waits for {self.name!r} of an evaluation, and this fit has none; give fit or initialize an "
                "eval_dataloader (and eval_interval= or eval_steps= above 0), or leave the hook out"
            )

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
