"""The engine's half that looks at the run's numbers, when it is asked or when the run stops at inf or nan."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...amp.result import StepResult
from ...errors import InputError, NonFiniteError
from ..cycle import refuse_inside
from ..passes import Passes
from ..saving import Saving
from .last_batch import LastBatch
from .parts import Parts

if TYPE_CHECKING:
    from .diagnosis import Diagnosis
    from .faults import Fault
    from .precision_report import PrecisionReport

KEPT = 60
"""Results of so many updates are kept."""


class Health(Saving):
    """Diagnosis of inf and nan, and `precision_report`."""

    _criterion: Callable[..., Any] | None
    _passes: Passes
    _seen: LastBatch

    def precision_report(self) -> PrecisionReport:
        """What the config's precision does to the numbers of each layer, measured on the last batch that went forward
        in training mode, which is computed twice more. All ranks together; nothing of the run changes.

        Returns:
            The report, the same on all ranks: `print(report)` shows a table, `report.to_dict()` gives plain values.

        Raises:
            InputError: before the first training forward, within an accumulation cycle, in evaluation mode, or for a
                batch that cannot be computed once more.
        """
        self._refuse_if_closed()
        refuse_inside(self._cycle, "engine.precision_report()")
        self.context.agree_on_call("engine.precision_report")
        from .replay import find_problem
        from .survey import make_report

        problem = find_problem(self._parts, self._seen)
        if problem is not None:
            raise InputError(f"engine.precision_report() computes the last batch once more, but {problem}")
        return make_report(self._parts, self._seen, self._last_results())

    def count_flops(self, compute: Callable[[], Any]) -> dict[str, int]:
        """Floating point operations of forward, criterion and backward, a multiplication and an addition being two:

            flops = engine.count_flops(lambda: engine.criterion(engine(images), labels))

        Products of matrices, convolutions and attention are counted while the batch is computed once, uncompiled; what
        is computed again for activation checkpointing is not. All ranks together; nothing of the run changes.

        Args:
            compute: gives the loss. It is called on each rank with what `engine(...)` is called with there.

        Returns:
            By dtype, {"torch.bfloat16": 12345}, of all the ranks that compute this data rank's batch.

        Raises:
            InputError: within an accumulation cycle; or it cannot be counted (an operator without a formula).
        """
        self._refuse_if_closed()
        refuse_inside(self._cycle, "engine.count_flops()")
        self.context.agree_on_call("engine.count_flops")
        from ..flops import count_flops

        automatic, seen = self._automatic, self._seen
        self._automatic, self._seen = None, LastBatch()
        try:
            return count_flops(self._parts, compute)
        finally:
            self._automatic, self._seen = automatic, seen

    def _explain(self, error: NonFiniteError) -> None:
        """Add to `error` why it came. All ranks together; the update that failed is over."""
        try:
            error.diagnosis = self._diagnose(error)
            error.args = (f"{error}\n{error.diagnosis}",)
        except Exception as reason:  # the user is to see the first error, whatever comes after it
            _note(error, reason)

    def _diagnose(self, error: NonFiniteError) -> Diagnosis:
        from .diagnosis import make_diagnosis
        from .examine import examine
        from .replay import FailedTogether

        fault: Fault | None = None
        notes: list[str] = []
        failed: str | None = None
        try:
            fault, notes, failed = examine(self._parts, self._seen)
        except FailedTogether as reason:
            failed = str(reason)
        except Exception as reason:
            failed = f"{type(reason).__name__}: {reason}".partition("\n")[0]
            if self.context.size > 1:
                failed += "; the ranks may be in different places now: end the run"
            _note(error, reason)
        about = self._update.recipe, fault, notes, failed, self.context.size
        return make_diagnosis(self._last_results(), self._last_scales(), *about)

    def _last_results(self) -> list[StepResult]:
        """Those of the last updates, oldest first."""
        newest = self.global_step % KEPT
        return [result for result in self._results[newest:] + self._results[:newest] if result is not None]

    def _last_scales(self) -> list[float]:
        """The loss scales of the last updates and of the present one, oldest first; none without loss scaling."""
        losses, loss_id = self._update.losses, self._seen.loss_id
        if not losses.scalers:
            return []
        before = [result.loss_scale for result in self._last_results()] if loss_id == 0 else []  # of the first loss
        return [*before, losses.current()[loss_id]]

    @property
    def _parts(self) -> Parts:
        call = self._update, self._precision, self.context, self._passes, self._division, self._cycle
        return Parts(self.model, self._criterion, *call)


def _note(error: NonFiniteError, reason: Exception) -> None:
    error.add_note(f"what failed afterwards: {''.join(traceback.format_exception(reason))}")
