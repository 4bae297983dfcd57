"""The likely cause of a difference and what to try, by the kind of place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .record import Key
from .report import Difference


@dataclass(frozen=True)
class Place:
    """Where runs differ first, and what is known about it.

    Attributes:
        key: of the reference's tensor.
        caller: the module that called the one of `key`; None: nobody did.
        before: the last module of which all outputs agree.
        consumers: modules that were given the output of which this is the gradient.
        after: the module that is called next.
        names: all parameters that differ at this point.
        total: how many there are.
        equals_accumulated: the gradients are those of a process that accumulates the ranks' batches.
        factor: which all gradients are of the reference's.
        drawn: functions that drew random numbers.
    """

    key: Key
    caller: str | None = None
    before: str | None = None
    consumers: tuple[str, ...] = ()
    after: str | None = None
    names: tuple[str, ...] = ()
    total: int = 0
    equals_accumulated: bool = False
    factor: float | None = None
    drawn: tuple[str, ...] = ()


def explain(place: Place, apart: float, allowed: float, ranks: Sequence[int], text: str = "") -> Difference:
    """The difference in words."""
    what, module, where = _where(place)
    if text:
        where = text
    else:
        where += f" by {apart:.1e} (allowed {allowed:.0e})"
    if ranks:
        where += f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    cause, advice = _cause(place, what)
    return Difference(place.key.update, what, module, apart, allowed, tuple(ranks), where, cause, advice)


def _where(place: Place) -> tuple[str, str, str]:
    """What differs, which module or parameter it is, and where that is in words."""
    key, name = place.key, _named(place.key.name)
    some = f"{len(place.names)} of {place.total}"
    match key.what:
        case "input":
            caller, before = _named(place.caller), f"between {place.before} and" if place.before else "before"
            text = f"forward of {caller}, in its own code {before} {name}, whose input {key.slot!r} differs"
            return "output", place.caller or "", text
        case "output":
            return "output", key.name, f"forward of {name}: its inputs agree, its output differs"
        case "grad_output":
            users = place.consumers or ((place.after,) if place.after else ())
            if not users:
                return "loss", key.name, f"backward of the loss: the gradient of the output of {name} differs"
            used = " and ".join(map(_named, users))
            text = f"backward of {used}, or of the code before it: the gradient of the output of {name} differs"
            return "grad_output", users[0], text
        case "gradient":
            text = f"gradients of {some} parameters differ, the first {name},"
            if place.factor is not None and abs(place.factor - 1) > 1e-5:
                text = f"gradients of {some} parameters, first {name}, are {place.factor:.4g} x the reference's,"
            return "gradient", key.name, text
        case "begin":
            text = f"the model's weights after update {key.update - 1}: {some} parameters differ, the first {name},"
            return "update", key.name, text
        case "update":
            return "update", key.name, f"weights after the update: {some} parameters differ, the first {name},"
    return key.what, key.name, f"{key.what} of {name} differs"


def _named(name: str | None) -> str:
    return name if name else "the model"


def _cause(place: Place, what: str) -> tuple[str, str]:
    if (
        place.equals_accumulated
        and place.factor is not None
        and abs(place.factor - 1) > 1e-6
        and what in ("loss", "gradient")
    ):
        return (
            "the loss is a sum over samples, and ranks average theirs",
            "set loss_reduction='sum', or let the criterion return a mean",
        )
    if place.equals_accumulated and what in ("loss", "gradient"):
        return (
            "the criterion is no mean over samples (ignored targets in unequal numbers, samples compared with each "
            "other): the result is that of one process which accumulates the ranks' batches",
            "return (sum, weight) and set loss_reduction='weighted'; or expect the batch of one rank to be what counts",
        )
    if what == "output" and place.drawn:
        return (
            f"random numbers: {', '.join(place.drawn)} was called",
            "draw them outside of the model, or switch that off here",
        )
    return "", ""
