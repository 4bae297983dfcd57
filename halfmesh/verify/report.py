"""The result of a verification, for a person and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from textwrap import indent
from typing import Any

from ..errors import counted, shorten


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
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return found

    def __str__(self) -> str:
        result = "refused" if self.problems else "equal" if self.equal else "differs"
        shrunk = f", in place of {self.shrunk_from}" if self.shrunk_from else ""
        head = f"{result}: {self.layout} ({counted(self.world_size, 'rank')}{shrunk}) beside one process"
        parts = [indent(f"- {part}", "  ") for part in [*self.phases, *self.problems]]
        return "\n".join([head, *parts, *([str(self.first)] if self.first else [])])
