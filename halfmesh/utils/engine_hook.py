"""The base class of hooks on an engine's loop, and the progress of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..amp.step_result import StepResult


# The number of step results that an engine keeps.
RESULT_HISTORY = 60


@dataclass(eq=False)
class Progress:
    """The progress of an engine's training.

    Attributes:
        global_step: the number of optimizer steps attempted so far, skipped ones included.
        calls: the number of calls of the model since the last of them, in training and evaluation.
        results: the results of the last steps, the newest last.
    """

    global_step: int = 0
    calls: int = 0
    results: deque[StepResult] = field(default_factory=lambda: deque(maxlen=RESULT_HISTORY))


class EngineHook:
    """The base class of hooks on an engine's loop. An event that a class does not override costs nothing.

    All ranks reach the events in the same order, so a hook may communicate. In `close` it may only if `error` is None.
    """

    def before_fetch(self) -> None:
        """Called before the engine's training loader fetches a batch."""

    def before_forward(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the inputs before each call of the model, or of its `method`. `model.training` is False in
        evaluation."""

    def before_backward(self, loss: Any) -> None:
        """Called when `engine.backward(loss)` begins."""

    def after_backward(self, loss: Any) -> None:
        """Called when the gradients of one microbatch have been added."""

    def before_step(self) -> None:
        """Called when `engine.step` begins, also inside an accumulation cycle."""

    def after_step(self, result: StepResult) -> None:
        """Called after each update, taken or skipped."""

    def after_load(self) -> None:
        """Called after a checkpoint or a state dict was loaded."""

    def close(self, error: BaseException | None) -> None:
        """Called when the engine closes. `error` is the reason, or None. Other ranks may have ended already."""


class Hooks:
    """The hooks of an engine.

    Attributes:
        calls: for each event, the methods of the hooks that override it. The engine calls these.
    """

    def __init__(self) -> None:
        self._hooks: list[EngineHook] = []
        self.calls: dict[str, list[Callable[..., None]]] = {}
        self._set([])

    def add(self, hook: EngineHook) -> None:
        """From now on `hook` runs after the others."""
        self._set([*self._hooks, hook])

    def remove(self, hook: EngineHook) -> None:
        """From now on `hook` does not run."""
        self._set([other for other in self._hooks if other is not hook])

    @contextmanager
    def added(self, hook: EngineHook) -> Iterator[None]:
        """A scope in which `hook` also runs."""
        self.add(hook)
        try:
            yield
        finally:
            self.remove(hook)

    def run(self, event: str, *args: Any) -> None:
        """Call the hooks that override `event`."""
        for call in self.calls[event]:
            call(*args)

    def close(self, error: BaseException | None) -> None:
        """Close the hooks, once."""
        hooks = self._hooks
        self._set([])
        for hook in hooks:
            hook.close(error)

    def _set(self, hooks: list[EngineHook]) -> None:
        self._hooks = hooks
        for event in (name for name in vars(EngineHook) if not name.startswith("_")):
            overriding = [hook for hook in hooks if getattr(type(hook), event) is not getattr(EngineHook, event)]
            self.calls[event] = [getattr(hook, event) for hook in overriding]
