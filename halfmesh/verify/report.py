"""The result of a verification, as text and as JSON: the first difference, its likely cause, and what to try."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import indent
from typing import Any, NamedTuple

from ..distributed.env import list_ranks
from ..errors import counted, page, shorten
from .compare import Measures, ratio
from .record import Key, Store


@dataclass(frozen=True)
class Difference:
    """Where a layout first differs from its reference.

    Attributes:
        step: the update, from 0.
        what: "input", "output", "grad_output", "gradient", "update", "buffer", "loss", "norm", or "overflow" (the
            overflow decision, loss scale and learning rate); "failed" or "hangs" of ranks.
        module: the name of the module, parameter or buffer; "" is the model itself.
        difference: relative; inf (null in JSON) where no number describes it.
        allowed: the largest difference that passes.
        ranks: the ranks that differ.
        where: the place in words.
        cause: the likely cause; the traceback of ranks that failed, the stacks of ranks that hang.
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
        name: "structure" or "format".
        dtype: the format in which both compute, such as "float64" or "naive float16".
        equal: whether no tensor differs by more than is allowed.
        first: the first difference, or None.
        compared: the number of tensors compared.
        skipped: "what of module" -> why it was not compared.
        largest: what -> the largest difference / allowed. "begin" is of the weights that an update starts from.
        seconds: how long the phase took.
        notes: what was replaced or left out.
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
        by_why = {why: [name for name in self.skipped if self.skipped[name] == why] for why in self.skipped.values()}
        lines = (f"skipped: {shorten(names)}: {why}" for why, names in by_why.items())
        return "\n  ".join([text, *lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class VerifyReport:
    """The result: a layout computes what one process computes, or the place where it does not.

    Attributes:
        equal: whether all phases are equal.
        first: the first difference of the first phase that differs, or None.
        phases: the comparisons that ran.
        layout: the mesh that ran.
        world_size: the number of ranks that ran.
        shrunk_from: the number of ranks you asked for, if fewer ran.
        problems: why the layout is rejected; then there are no phases.
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
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return found

    def __str__(self) -> str:
        result = "rejected" if self.problems else "equal" if self.equal else "differs"
        shrunk = f", in place of {self.shrunk_from}" if self.shrunk_from else ""
        head = f"{result}: {self.layout} ({counted(self.world_size, 'rank')}{shrunk}) compared with one process"
        parts = [indent(f"- {part}", "  ") for part in [*self.phases, *self.problems]]
        return "\n".join([head, *parts, *([str(self.first)] if self.first else [])])


# -- a difference in words -------------------------------------------------------------------------------------------

CAUSES = """
gradient update | copies | an all-reduce or a broadcast between these ranks is missing, or uses other ranks |
gradient | factor | a sum or mean over ranks or microbatches is taken twice or not at all (x {factor:.4g}), or the \
loss is a sum over samples | set loss_reduction='sum', or return a mean
loss gradient | all rows | the criterion is not a mean over samples (different numbers of ignored targets, or samples \
compared with each other) | return (sum, weight) and set loss_reduction='weighted'; or, if it should compare the \
samples of one rank's batch, prove the rest with --accumulated (accumulated=True)
output | later | the module keeps state from an earlier call (an attribute, a cache), or draws random numbers | \
keep no state of a batch; draw outside the model
output | cp | tokens are combined outside attention, or positions start from 0 on each rank |
output | ep | tokens reach other experts, or the model combines rows of the batch | compute each row on its own
output | tp | the model combines features that are split over tensor ranks, or a style or size is wrong | {plan}
output | rows | the model combines rows of the batch, draws random numbers, or uses the rank | compute each \
row on its own; to combine rows of all ranks, use engine.context.all_reduce
grad_output | tp | a gradient is summed over the tensor ranks twice, or not at all | {plan}
grad_output | rows | a backward or a hook combines rows, or an activation was computed or saved differently |
gradient | tp | a gradient of a part of the activations is not summed (style 'partial'), or summed twice |
gradient | rows | something (a hook?) changes or drops gradients before they are averaged over ranks |
norm | | a part or a copy of a parameter counts twice in the norm, or not at all |
overflow | | the ranks disagree on an overflow, or the loss scale changes at another update |
update | | new weights do not reach all ranks, or the optimizer needs whole tensors | set its unit='matrix'
buffer | | each data rank updates it from its own batches | all-reduce it in the model, or accept it
loss | | the criterion is not a mean over samples, or counts other targets | set loss_reduction
"""
"""The kind of the first difference, the signs that must all be present, the likely cause, and what to try. The first
row that fits is taken. Signs: "copies" of a parameter on several ranks differ; "all" gradients differ; by the same
"factor"; this is "later" than the first call of a rank; and what ranks share: "tp", "cp", "ep", and "rows" of a
batch."""
_PLAN = (
    f"leave these layers out of the plan, or give sizes as -1 or by 'heads(name)' (see {page('Tensor parallelism')})"
)


class Finding(NamedTuple):
    """A difference.

    Attributes:
        order: in time, in the reference.
        text: the place in words, of figures and of copies that differ between ranks.
    """

    order: int
    key: Key
    distance: float
    allowed: float
    ranks: tuple[int, ...]
    text: str = ""


def explain(store: Store, measures: Sequence[Measures], finding: Finding, same: Sequence[Key]) -> Difference:
    """The difference in words. `same`: all keys that differ at this point."""
    key, signs, names = finding.key, {"copies"}, {k.name for k in same}
    factor = None if finding.text else _common_factor(measures, key.update)
    what, module, where = _where(store, key, same, factor)
    if finding.text:
        where = finding.text
    else:
        where += f" by {finding.distance:.1e} (allowed {finding.allowed:.0e})"
        has_all = what == "loss" or names >= {k.name for k in store.tensors if k.what == "gradient"}
        known = {"factor": factor, "all": has_all, "later": _is_later(measures, finding)}
        signs = {*measures[0].shares, *(sign for sign, is_there in known.items() if is_there)}
    if finding.ranks:
        where += f" on {list_ranks(finding.ranks)}"
    rows = ([cell.strip() for cell in row.split("|")] for row in CAUSES.strip().splitlines())
    fits = (texts for kinds, needed, *texts in rows if what in kinds.split() and signs.issuperset(needed.split()))
    cause, advice = (text.format(factor=factor, plan=_PLAN) for text in next(fits, ("", "")))
    return Difference(key.update, what, module, finding.distance, finding.allowed, finding.ranks, where, cause, advice)


def _where(store: Store, key: Key, same: Sequence[Key], factor: float | None) -> tuple[str, str, str]:
    """The kind of difference, the module or parameter, and the place in words."""
    events, name = list(store.tensors), key.name or "the model"
    total = sum((k.update, k.what) == (key.update, key.what) for k in events)
    some = f"{len({k.name for k in same})} of {total} parameters"
    match key.what:
        case "input":
            caller = store.callers.get((key.name, key.nth)) or ""
            done = [k.name for k in events[: events.index(key)] if (k.update, k.what) == (key.update, "output")]
            after = f"between {done[-1]} and" if done and done[-1] else "before"
            text = (
                f"forward of {caller or 'the model'}, in its own code {after} {name}, whose input {key.slot!r} differs"
            )
            return "output", caller, text
        case "output":
            return "output", key.name, f"forward of {name}: its inputs agree, its output differs"
        case "grad_output":
            user, text = _next_module(key, events), f"the gradient of the output of {name} differs"
            if user is None:
                return "loss", key.name, f"backward of the loss: {text}"
            return "grad_output", user, f"backward of {user or 'the model'}, or of the code before it: {text}"
        case "gradient" if factor is not None:
            return "gradient", key.name, f"gradients of {some}, first {name}, are {factor:.4g} x the reference's,"
        case "gradient":
            return "gradient", key.name, f"gradients of {some} differ, the first {name},"
        case "begin" | "update":
            when = "the model's weights before the update" if key.what == "begin" else "weights after the update"
            when = "weights before the first update" if key.update < 0 else when
            return "update", key.name, f"{when}: {some} differ, the first {name},"
    return key.what, key.name, f"{key.what} of {name} differs"


def _next_module(key: Key, events: Sequence[Key]) -> str | None:
    """The module that is called next after the one of `key` has returned; None if there is none in this call."""
    returned = key._replace(what="output")
    later = events[events.index(returned) + 1 :] if returned in events else []
    return next((k.name for k in later if (k.update, k.call, k.what) == (key.update, key.call, "input")), None)


def _common_factor(measures: Sequence[Measures], update: int) -> float | None:
    """Which all gradients are of the reference's, if it is not 1."""
    found = (item for rank in measures for item in rank.tensors.items())
    factors = [m[""].factor for k, m in found if (k.update, k.what) == (update, "gradient") and m[""].norm]
    is_common = factors and max(factors) - min(factors) <= 1e-6 * max(map(abs, factors))
    return factors[0] if is_common and abs(factors[0] - 1) > 1e-5 else None


def _is_later(measures: Sequence[Measures], finding: Finding) -> bool:
    """Return True if each rank agreed in an earlier update, or in its first part of the batch."""
    firsts = (ways for rank in measures for key, ways in rank.firsts.items() if key == finding.key)
    return finding.key.update > 0 or all(min(map(ratio, ways.values())) <= finding.allowed for ways in firsts)
