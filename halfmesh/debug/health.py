"""The diagnosis of a run that stops at inf or nan, and the precision report."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from ..engine.parts import EngineParts
from ..errors import InputError, NonFiniteError
from .last_batch import LastBatch
from .parts import Parts

if TYPE_CHECKING:
    from .diagnosis import Diagnosis
    from .faults import Fault
    from .precision_report import PrecisionReport


def precision_report(parts: EngineParts, last_batch: LastBatch) -> PrecisionReport:
    """`Engine.precision_report`."""
    from .replay import find_problem
    from .survey import make_report

    problem = find_problem(Parts.of(parts), last_batch)
    if problem is not None:
        raise InputError(f"engine.precision_report() computes the last batch once more, but {problem}")
    with parts.guard.own_call():
        return make_report(Parts.of(parts), last_batch, list(parts.results))


def explain(parts: EngineParts, last_batch: LastBatch, error: NonFiniteError) -> None:
    """Add to `error` why it came. All ranks together; the update that failed is over."""
    if parts.config.name is not None:
        error.add_note(f"in the engine named {parts.config.name!r}")
    try:
        error.diagnosis = _diagnose(parts, last_batch, error)
        error.args = (f"{error}\n{error.diagnosis}",)
    except Exception as reason:  # the user is to see the first error, whatever comes after it
        _note(error, reason)


def _diagnose(parts: EngineParts, last_batch: LastBatch, error: NonFiniteError) -> Diagnosis:
    from .diagnosis import make_diagnosis
    from .examine import examine
    from .replay import FailedTogether

    fault: Fault | None = None
    notes: list[str] = []
    failed: str | None = None
    try:
        with parts.guard.own_call():
            fault, notes, failed = examine(Parts.of(parts), last_batch)
    except FailedTogether as reason:
        failed = str(reason)
    except Exception as reason:
        failed = f"{type(reason).__name__}: {reason}".partition("\n")[0]
        if parts.context.size > 1:
            failed += "; the ranks may be in different places now: end the run"
        _note(error, reason)
    about = parts.update.recipe, fault, notes, failed, parts.context.size
    return make_diagnosis(list(parts.results), _last_scales(parts, last_batch.loss_id), *about)


def _last_scales(parts: EngineParts, loss_id: int) -> list[float]:
    """The loss scales of the last updates and of the present one, oldest first; none without loss scaling."""
    losses = parts.update.loss_scales
    if not losses.scalers:
        return []
    before = [result.loss_scale for result in parts.results] if loss_id == 0 else []  # of the first loss
    return [*before, losses.current()[loss_id]]


def _note(error: NonFiniteError, reason: Exception) -> None:
    error.add_note(f"what failed afterwards: {''.join(traceback.format_exception(reason))}")
