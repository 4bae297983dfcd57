"""Why a run met inf or nan: what was found when its last batch was computed once more, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..amp.recipe import Recipe
from ..amp.step_result import StepResult
from ..errors import bullet_list
from .faults import Fault
from .tensor_numbers import Numbers, largest_number
from .words import advise

_SHOWN = 9
"""So many scales of the history are shown, the first and the last ones."""


@dataclass(frozen=True)
class Diagnosis:
    """What `NonFiniteError.diagnosis` holds. The same on all ranks.

    Attributes:
        scales: the loss scales of the last updates, oldest first, each with the number of updates that it was used for;
            the last one is that of the update that failed. Empty without loss scaling.
        skipped, updates: how many of the last updates were skipped, of how many.
        fault: the first inf or nan; None if all was finite.
        notes: what was not computed as it was in the run.
        failed: why the batch was not computed once more; None if it was.
        advice: what to do.
    """

    scales: tuple[tuple[float, int], ...]
    skipped: int
    updates: int
    fault: Fault | None
    notes: tuple[str, ...]
    failed: str | None
    advice: str
    world_size: int = 1

    def __str__(self) -> str:
        lines = []
        if self.updates:
            lines.append(f"{self.skipped} of the {self.updates} updates before this one were skipped")
        if self.scales:
            lines.append(f"loss scale: {_course(self.scales)}")
        if self.failed is not None:
            lines.append(f"the last batch was not computed once more: {self.failed}")
        elif self.fault is None:
            lines.append("no inf or nan was met when the last batch was computed once more")
        else:
            lines.append(f"first inf or nan, as the last batch is computed: {describe(self.fault, self.world_size)}")
        lines += [*self.notes, f"advice: {self.advice}"]
        return bullet_list("Diagnosis:", lines)


def make_diagnosis(
    results: Sequence[StepResult],
    scales: Sequence[float],
    recipe: Recipe,
    fault: Fault | None,
    notes: Sequence[str],
    failed: str | None,
    world_size: int,
) -> Diagnosis:
    """A diagnosis from the results of the last updates, and the loss scales of these and of the one that failed, oldest
    first; empty without loss scaling."""
    return Diagnosis(
        _runs(scales),
        sum(result.skipped for result in results),
        len(results),
        fault,
        tuple(notes),
        failed,
        advise(fault, recipe, scales[-1] if scales else None, failed is not None),
        world_size,
    )


def describe(fault: Fault, world_size: int) -> str:
    """One line about where inf or nan are."""
    return f"{_WORDS[fault.kind](fault)}{_on_ranks(fault.ranks, world_size)}"


def _weight(fault: Fault) -> str:
    if fault.numbers.bad:
        return f"the weight {fault.name!r}, before the forward: {_counts(fault.numbers)}"
    reach, end = fault.numbers.largest, _end(fault.dtype, largest_number(fault.dtype))
    return f"the weight {fault.name!r}, before the forward: it reaches {reach:.3g}, and {end}"


def _input(fault: Fault) -> str:
    return f"the batch: argument {fault.name!r} of the model holds {_counts(fault.numbers)}"


def _target(fault: Fault) -> str:
    return f"what the criterion was given besides the model's output holds {_counts(fault.numbers)}"


def _between(fault: Fault) -> str:
    what = f"{fault.name!r} ({fault.layer})" if fault.name else "the model"
    what = "the criterion" if not fault.layer else what
    made = ", made by operations in the forward of " + " ".join(fault.around) if fault.around else ""
    made = ", by the cast of a batch that is finite" if not fault.name else made
    return f"what {what} was given, in {_name(fault.dtype)}{made}: {_counts(fault.numbers)}"


def _output(fault: Fault) -> str:
    inner = "; what the modules within it return is finite, it comes from operations in its own forward"
    weights = f", its weights {fault.weights:.3g}" if fault.weights else ""
    what = f"{fault.name!r} ({fault.layer})" if fault.name else f"the model ({fault.layer})"
    return (
        f"the output of {what}, in {_name(fault.dtype)}: {_counts(fault.numbers)}; what it was given reaches "
        f"{fault.inputs:.3g}{weights}; {_end(fault.dtype, largest_number(fault.dtype))}{inner if fault.inner else ''}"
    )


def _loss(fault: Fault) -> str:
    return (
        f"the value of the criterion, in {_name(fault.dtype)}: {_counts(fault.numbers)}; what it was given is finite "
        f"and reaches {fault.inputs:.3g}"
    )


def _gradient(fault: Fault) -> str:
    users = " or ".join(fault.around)
    if not fault.name:
        return (
            f"the gradient of what {users} was given, in {_name(fault.dtype)}, made by its backward: "
            f"{_counts(fault.numbers)}"
        )
    made = f"made by the backward of {users}" if users else "made by the backward of what follows it"
    return (
        f"the gradient of the output of {fault.name!r} ({fault.layer}), in {_name(fault.dtype)}, {made}: "
        f"{_counts(fault.numbers)}"
    )


def _parameter(fault: Fault) -> str:
    return (
        f"the gradient of the parameter {fault.name!r}, in {_name(fault.dtype)}: {_counts(fault.numbers)}, the others "
        f"reach {fault.numbers.largest:.3g}; gradients of activations are finite up to there"
    )


def _complete(fault: Fault) -> str:
    return f"the gradient of the parameter {fault.name!r}, complete over the ranks: {_counts(fault.numbers)}"


_WORDS = {
    "weight": _weight,
    "input": _input,
    "target": _target,
    "between": _between,
    "output": _output,
    "loss": _loss,
    "gradient": _gradient,
    "parameter": _parameter,
    "complete gradient": _complete,
}


def _counts(numbers: Numbers) -> str:
    kinds = [f"{count} {kind}" for count, kind in ((numbers.inf, "inf"), (numbers.nan, "nan")) if count]
    return f"{' and '.join(kinds)} of {numbers.count} numbers"


def _end(dtype: torch.dtype, end: float) -> str:
    return f"{_name(dtype)} ends at {end:.5g}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _on_ranks(ranks: Sequence[int], world_size: int) -> str:
    if world_size == 1:
        return ""
    if len(ranks) == world_size:
        return ", on all ranks"
    return f", on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _runs(scales: Sequence[float]) -> tuple[tuple[float, int], ...]:
    runs: list[tuple[float, int]] = []
    for scale in scales:
        if runs and runs[-1][0] == scale:
            runs[-1] = scale, runs[-1][1] + 1
        else:
            runs.append((scale, 1))
    return tuple(runs)


def _course(runs: Sequence[tuple[float, int]]) -> str:
    words = [f"{scale:g}" + (f" ({count} updates)" if count > 1 else "") for scale, count in runs]
    if len(words) > _SHOWN:
        words = [*words[: _SHOWN // 2], f"({len(words) - _SHOWN + 1} more)", *words[-(_SHOWN // 2) :]]
    return " -> ".join(words)
