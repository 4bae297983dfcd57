"""The result of a verification, for a person and as JSON; where runs differ first, with its likely cause."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import indent
from typing import Any

from ..distributed.env import list_ranks
from ..errors import shorten
from .record import Key


@dataclass(frozen=True)
class Difference:
    """Where a layout first differs from its reference.

    Attributes:
        step: the update, from 0.
        what: input, output, grad_output, gradient, update, buffer, loss, norm, verdict; failed or hangs, of ranks.
        module: its name, or that of the parameter or buffer; "" is the model itself.
        difference: relative; inf where there is no number for it.
        ranks: that differ.
        where: the place in words.
        cause: what probably causes it; of ranks that failed the traceback, of those that hang the stacks.
        advice: what to try.
    """

    step: int
    what: str
    module: str
    difference: float
    allowed: float
    ranks: tuple[int, ...]
    where: str
    cause: str
    advice: str

    def __str__(self) -> str:
        lines = [f"first difference: update {self.step}, {self.where}"]
        label = "" if self.what in ("failed", "hangs") else "likely cause: "
        lines += [label + self.cause] if self.cause else []
        lines += [f"to try: {self.advice}"] if self.advice else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Phase:
    """One comparison of the layout with a reference.

    Attributes:
        name: "structure", or "format".
        dtype: in which both compute: "float64", "naive float16".
        compared: how many tensors.
        skipped: those that no part of the reference fits: why, by "what of module".
        largest: by what the largest difference as a share of what is allowed; begin: of weights before an update.
    """

    name: str
    dtype: str
    equal: bool
    first: Difference | None
    compared: int = 0
    skipped: Mapping[str, str] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        head = f"{self.name}, {self.dtype}: {'equal' if self.equal else 'differs'}"
        text = f"{head} ({self.compared} tensors compared{skipped}; {self.seconds:.1f} s)"
        if self.equal and self.largest:
            what, share = max(self.largest.items(), key=lambda item: item[1])
            text += f"; largest difference: {what}, {share:.1g} of what is allowed"
        by_why: dict[str, list[str]] = {}
        for name, why in self.skipped.items():
            by_why.setdefault(why, []).append(name)
        lines = (f"skipped: {shorten(names)}: {why}" for why, names in by_why.items())
        return "\n  ".join([text, *lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class VerifyReport:
    """The result: a layout computes what one process computes, or the place where it does not.

    Attributes:
        equal: in all phases.
        first: of the first phase that differs.
        layout: the mesh, as it ran on `world_size` ranks.
        shrunk_from: the number of ranks that was asked for, if fewer ran.
        problems: why the layout is refused; then there are no phases.
    """

    equal: bool
    first: Difference | None
    phases: tuple[Phase, ...]
    layout: str
    world_size: int
    shrunk_from: int | None = None
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no inf: it becomes None."""
        return _finite(asdict(self))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        result = "refused" if self.problems else "equal" if self.equal else "differs"
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        shrunk = f", in place of {self.shrunk_from}" if self.shrunk_from else ""
        yield f"{result}: {self.layout} ({ranks}{shrunk}) beside one process"
        for part in [*self.phases, *self.problems]:
            yield indent(f"- {part}", "  ")
        if self.first is not None:
            yield str(self.first)


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# -- where, and why ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where runs differ first, and what is known about it.

    Attributes:
        key: of the reference's tensor.
        caller, before, after: who called the module of `key`; the last of which all outputs agree; which comes next.
        consumers: modules that were given the output of which this is the gradient.
        names, total: the parameters that differ at this point, and how many there are.
        shares: what ranks share: "tp", "cp", "ep", and "rows" of a batch (data ranks, accumulation, microbatches).
        equals_accumulated: the gradients are those of a process that accumulates the ranks' batches.
        factor: which all gradients are of the reference's.
        drawn: functions that drew random numbers.
        is_later: each rank agrees in its first part of the batch.
        direct: of parameters of which each tensor rank holds a part those that are used directly, and by which module.
    """

    key: Key
    caller: str | None = None
    before: str | None = None
    after: str | None = None
    consumers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    total: int = 0
    shares: tuple[str, ...] = ()
    equals_accumulated: bool = False
    factor: float | None = None
    drawn: tuple[str, ...] = ()
    is_later: bool = False
    direct: Mapping[str, str] = field(default_factory=dict)


def explain(place: Place, apart: float, allowed: float, ranks: Sequence[int], text: str = "") -> Difference:
    """The difference in words. `text`: where it is, if that is known."""
    what, module, where = _where(place)
    where = text or f"{where} by {apart:.1e} (allowed {allowed:.0e})"
    if ranks:
        where += f" on {list_ranks(ranks)}"
    cause, advice = _cause(place, what, module, is_copy=bool(text))
    return Difference(place.key.update, what, module, apart, allowed, tuple(ranks), where, cause, advice)


def _where(place: Place) -> tuple[str, str, str]:
    """The kind of difference, the module or parameter, and the place in words."""
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
        case "begin" | "update":
            when = "the model's weights before the update" if key.what == "begin" else "weights after the update"
            when = "weights before the first update" if key.update < 0 else when
            return "update", key.name, f"{when}: {some} parameters differ, the first {name},"
    return key.what, key.name, f"{key.what} of {name} differs"


def _named(name: str | None) -> str:
    return name if name else "the model"


_SUM = "the loss is a sum over samples, and ranks average theirs", "set loss_reduction='sum', or return a mean"
_NO_MEAN = (
    "the criterion is no mean over samples (ignored targets in unequal numbers, samples compared with each other): the "
    "result is that of one process which accumulates the ranks' batches",
    "return (sum, weight) and set loss_reduction='weighted'; or, if it should compare the samples of one rank's batch, "
    "prove the rest with --accumulated (accumulated=True)",
)
_KEPT = "something is kept from an earlier call (an attribute, a cache, old weights)", "keep nothing of a batch"
_PLAN = "leave those layers whole in the plan, or give sizes as -1 or by 'heads(name)' (docs/tensor-parallel.md)"
_APART = "compute each row by itself; what all ranks need, engine.context.all_reduce sums"
_WHOLE = "take an optimizer that works element by element (SGD, AdamW), or data='replicate'"
_BY_KIND = {
    ("output", "tp"): ("features that tensor ranks share are combined, or a style or a size does not fit", _PLAN),
    ("output", "cp"): ("tokens are combined outside of attention, or positions count from 0 on each rank", ""),
    ("output", "ep"): ("tokens reach other experts, or rows of the batch are combined", _APART),
    ("output", "rows"): ("rows of the batch are combined, or the rank or the number of ranks is used", _APART),
    ("grad_output", "tp"): ("a gradient is summed over the tensor ranks once too often, or not at all", _PLAN),
    ("grad_output", "rows"): ("a backward or hook combines rows, or an activation was computed or kept otherwise", ""),
    ("gradient", "tp"): ("a gradient of a part of the activations is not summed (the style 'partial'), or twice", ""),
    ("gradient", "rows"): ("gradients are changed, or lost, before the ranks' are averaged (a hook?)", ""),
    ("norm", ""): ("a part or a copy of a parameter counts too often in the norm, or not at all", ""),
    ("verdict", ""): ("the ranks do not agree on an overflow, or the scale moves at another time", ""),
    ("update", ""): ("new weights do not reach all ranks, or the optimizer needs whole tensors and has parts", _WHOLE),
    ("buffer", ""): ("each data rank changes it by its own batches", "all-reduce it in the model, or expect it"),
    ("loss", ""): ("the criterion is no mean over samples, or counts other targets", "set loss_reduction"),
}


def direct_use(direct: Mapping[str, str]) -> str:
    """The cause where parameters of which a rank holds a part are used directly; "" if none are."""
    uses = [f"the code of {_named(user)} uses {name} itself" for name, user in direct.items()]
    call = "call the module that has it (self.proj(x), not self.proj.weight), or leave it whole in the plan"
    return f"{uses[0]}, of which each tensor rank has a part: {call}" if uses else ""


def _cause(place: Place, what: str, module: str, is_copy: bool) -> tuple[str, str]:
    if direct := {name: user for name, user in place.direct.items() if module in (name, user)}:
        return direct_use(direct), ""
    if is_copy and what in ("gradient", "update"):
        return "an all-reduce or a broadcast between these ranks is missing, or it is over other ranks", ""
    is_multiple = place.factor is not None and abs(place.factor - 1) > 1e-5
    if what in ("loss", "gradient") and place.equals_accumulated:
        return _SUM if is_multiple else _NO_MEAN
    if what == "gradient" and is_multiple:
        return f"a sum or mean over ranks or microbatches is taken twice or not at all (x {place.factor:.4g})", ""
    if what == "output" and place.drawn:
        return f"random numbers: {', '.join(place.drawn)} was called", "draw them outside of the model, or none here"
    if what == "output" and (place.key.update > 0 or place.is_later):
        return _KEPT
    return next((_BY_KIND[what, who] for who in (*place.shares, "") if (what, who) in _BY_KIND), ("", ""))
