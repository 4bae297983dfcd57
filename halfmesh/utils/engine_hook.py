"""The contract of hooks on an engine's loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..errors import NonFiniteError


class EngineHook:
    """A hook on an engine's loop. Events that a class does not override cost nothing.

    All ranks reach the events in the same order, so a hook may communicate; in `close` only without an error.
    """

    def before_fetch(self) -> None:
        """Called before the engine's training loader fetches a batch."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before the model, with its inputs; `model.training` tells training from evaluation."""

    def before_backward(self, loss: Any) -> None:
        """Called when `engine.backward(loss)` begins."""

    def after_backward(self, loss: Any) -> None:
        """Called when the gradients of one microbatch are added."""

    def before_step(self) -> None:
        """Called when `engine.step` begins; it may be inside an accumulation cycle."""

    def after_step(self, result: StepResult) -> None:
        """Called after an update, taken or skipped."""

    def on_error(self, error: NonFiniteError) -> None:
        """Called when an update raised `error`, on all ranks."""

    def close(self, error: BaseException | None) -> None:
        """Called when the engine closes, because of `error` if there is one; other ranks may have ended already."""
