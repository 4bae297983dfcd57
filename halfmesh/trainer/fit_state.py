"""What of a `fit` is saved with the engine: the state of its hooks, and of the record that is being made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine import Engine
from .evaluation import MeanLoss
from .hook import Hook, refuse_nothing

NAME = "trainer"
"""By which `engine.attach` knows it."""


class FitState:
    """Of each rank by itself: nothing is sent.

    Args:
        loss: what the next record's loss is made of.

    Attributes:
        evaluated_at: the update after which was evaluated last; -1: none.
    """

    def __init__(self, engine: Engine, loss: MeanLoss, hooks: Sequence[Hook]) -> None:
        self._context = engine.context
        self._loss = loss
        self._hooks = _named(hooks)
        self.evaluated_at = -1

    def state_dict(self) -> dict[str, Any]:
        states = {
            name: dict(refuse_nothing(hook, "state_dict", hook.state_dict())) for name, hook in self._hooks.items()
        }
        return {
            "ranks": list(self._context.shape),
            "loss": self._loss.state_dict(),
            "evaluated_at": self.evaluated_at,
            "hooks": {name: state for name, state in states.items() if state},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """In another layout the record's losses begin anew: those of other ranks are not here."""
        self.evaluated_at = state["evaluated_at"]
        if state["ranks"] == list(self._context.shape):
            self._loss.load_state_dict(state["loss"])
        for name, hook in self._hooks.items():
            if name in state["hooks"]:
                hook.load_state_dict(state["hooks"][name])


def _named(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """By class; of several of one class the second is "MetricHook 2"."""
    count: Counter[str] = Counter()
    named = {}
    for hook in hooks:
        kind = type(hook).__name__
        count[kind] += 1
        named[kind if count[kind] == 1 else f"{kind} {count[kind]}"] = hook
    return named
