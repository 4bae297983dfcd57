"""What may take part in an engine's loop."""

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
        """The engine's training loader is about to fetch a batch."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is about to be called, with these inputs; `model.training` says what for."""

    def before_backward(self, loss: Any) -> None:
        """`engine.backward(loss)` was called."""

    def after_backward(self, loss: Any) -> None:
        """Gradients of one microbatch are added."""

    def before_step(self) -> None:
        """`engine.step` was called; it may be inside an accumulation cycle."""

    def after_step(self, result: StepResult) -> None:
        """An update has ended, taken or skipped."""

    def on_error(self, error: NonFiniteError) -> None:
        """An update raised `error`, on all ranks."""

    def close(self, error: BaseException | None) -> None:
        """The engine closes, because of `error` if there is one; other ranks may already be gone."""
