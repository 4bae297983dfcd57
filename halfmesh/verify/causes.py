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
    key = place.key
    if key.what == "input":
        caller = _named(place.caller)
        between = f"between {_named(place.before)} and {_named(key.name)}" if place.before else f"before {_named(key.name)}"
        return "output", place.caller or "", f"forward of {caller}, its own code {between}: the input {key.slot!r} of the latter differs"
    if key.what == "output":
        return "output", key.name, f"forward of {_named(key.name)}: its inputs agree, its output differs"
    if key.what == "grad_output":
        users = place.consumers or ((place.after,) if place.after else ())
        if not users:
            return "loss", key.name, f"backward of the loss: the gradient of the output of {_named(key.name)} differs"
        used = " and ".join(map(_named, users))
        return "grad_output", users[0], f"backward of {used}, or of the code before it: the gradient of the output of {_named(key.name)} differs"
    if key.what == "gradient":
        factor = "" if place.factor is None or abs(place.factor - 1) < 1e-9 else f"; all are {place.factor:.4g} x the reference's"
        return "gradient", key.name, f"gradients of {len(place.names)} of {place.total} parameters, the first {key.name}{factor}: they differ"
    if key.what == "begin":
        return "update", key.name, f"the weights that the model computes with, after update {key.update - 1}: {len(place.names)} of {place.total} differ, the first {key.name},"
    if key.what == "update":
        return "update", key.name, f"weights after the update: {len(place.names)} of {place.total} differ, the first {key.name},"
    return key.what, key.name, f"{key.what} {key.name} differs".replace("  ", " ")


def _named(name: str | None) -> str:
    return name if name else "the model"


def _cause(place: Place, what: str) -> tuple[str, str]:
    if place.equals_accumulated and place.factor is not None and abs(place.factor - 1) > 1e-6 and what in ("loss", "gradient"):
        return (
            "the loss is a sum over samples, and ranks average theirs",
            "set loss_reduction='sum', or let the criterion return a mean",
        )
    if place.equals_accumulated and what in ("loss", "gradient"):
        return (
            "the criterion is no mean over samples (ignored targets in unequal numbers, samples compared with each other): "
            "the result is that of one process which accumulates the ranks' batches",
            "return (sum, weight) and set loss_reduction='weighted'; or expect the batch of one rank to be what counts",
        )
    if what == "output" and place.drawn:
        return f"random numbers: {', '.join(place.drawn)} was called", "draw them outside of the model, or switch that off here"
    return "", ""
