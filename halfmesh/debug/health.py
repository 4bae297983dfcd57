"""The run's numbers: what can be read of them, and the diagnosis of a run that stops at inf or nan."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..amp.precision import Precision
from ..engine.executor import Executor
from ..engine.saving import Saving
from ..errors import InputError, NonFiniteError
from .last_batch import LastBatch
from .parts import Parts

if TYPE_CHECKING:
    from .diagnosis import Diagnosis
    from .faults import Fault
    from .precision_report import PrecisionReport

KEPT = 60
"""Results of so many updates are kept."""


class Health(Saving):
    """Loss scale, norm and skips; diagnosis of inf and nan; `precision_report` and `count_flops`."""

    _criterion: Callable[..., Any] | None
    _executor: Executor
    _precision: Precision
    _last_batch: LastBatch

    @property
    def loss_scale(self) -> float:
        """The current loss scale (of loss_id 0); 1.0 without loss scaling. Reads the device."""
        return self.loss_scales[0]

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """The current loss scale of each loss. Reads the device."""
        return self._update.loss_scales.current()

    @property
    def skipped_steps(self) -> int:
        """Updates skipped so far because of inf or nan. Reads the device."""
        return self._update.skip_counter.skipped

    @property
    def grad_norm(self) -> float | None:
        """Gradient norm of the last update (`StepResult.grad_norm`); None before the first, or if not measured."""
        return self._results[-1].grad_norm if self._results else None

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
        self._accumulation.refuse_unfinished("engine.precision_report()")
        self.context.agree_on_call("engine.precision_report")
        from .replay import find_problem
        from .survey import make_report

        problem = find_problem(self._parts, self._last_batch)
        if problem is not None:
            raise InputError(f"engine.precision_report() computes the last batch once more, but {problem}")
        with self._guard.own_call():
            return make_report(self._parts, self._last_batch, list(self._results))

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
        self._accumulation.refuse_unfinished("engine.count_flops()")
        self.context.agree_on_call("engine.count_flops")
        from .flops import count_flops

        automatic, last_batch = self._automatic, self._last_batch
        self._automatic, self._last_batch = None, LastBatch()
        try:
            return count_flops(self._parts, compute)
        finally:
            self._automatic, self._last_batch = automatic, last_batch

    def _explain(self, error: NonFiniteError) -> None:
        """Add to `error` why it came. All ranks together; the update that failed is over."""
        if self.config.name is not None:
            error.add_note(f"in the engine named {self.config.name!r}")
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
            with self._guard.own_call():
                fault, notes, failed = examine(self._parts, self._last_batch)
        except FailedTogether as reason:
            failed = str(reason)
        except Exception as reason:
            failed = f"{type(reason).__name__}: {reason}".partition("\n")[0]
            if self.context.size > 1:
                failed += "; the ranks may be in different places now: end the run"
            _note(error, reason)
        about = self._update.recipe, fault, notes, failed, self.context.size
        return make_diagnosis(list(self._results), self._last_scales(), *about)

    def _last_scales(self) -> list[float]:
        """The loss scales of the last updates and of the present one, oldest first; none without loss scaling."""
        losses, loss_id = self._update.loss_scales, self._last_batch.loss_id
        if not losses.scalers:
            return []
        before = [result.loss_scale for result in self._results] if loss_id == 0 else []  # of the first loss
        return [*before, losses.current()[loss_id]]

    @property
    def _parts(self) -> Parts:
        call = self._update, self._precision, self.context, self._executor, self._division, self._accumulation
        return Parts(self.model, self._criterion, *call)


def _note(error: NonFiniteError, reason: Exception) -> None:
    error.add_note(f"what failed afterwards: {''.join(traceback.format_exception(reason))}")
