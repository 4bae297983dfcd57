"""Contenders that take turns in one process, and the ratios of their times.

Each round runs every contender once, in an order that is rotated from round to round. A contender's time is divided by
that of another one *in the same round*: whatever slows the machine down for longer than a round slows both.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

LOOP = "default loop"
AGAIN = "default loop again (A/A)"
FUSED = "loop with fused=True"
HALFMESH = "halfmesh"
REQUIRED = (LOOP, AGAIN, FUSED, HALFMESH)
"""A benchmark without one of these fails; a peer may be missing."""

MIN_ROUNDS, MAX_ROUNDS = 7, 101


class Unavailable(Exception):  # noqa: N818 - not an error: a contender that does not take part
    """This contender cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way to take training steps.

    Attributes:
        step: returns the loss, if it computes one.
        model: its Linear layers tell in which precision it computes.
        optimizer: its step counters are not counted as host reads.
        before: the part of a step that comes before `step`, if the two are timed separately.
    """

    name: str
    step: Callable[[], torch.Tensor | None]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    before: Callable[[], torch.Tensor | None] | None = None
    close: Callable[[], None] = lambda: None

    def run(self, steps: int) -> torch.Tensor | None:
        """Take `steps` whole steps, and return the last loss."""
        loss = None
        for _ in range(steps):
            prepared = self.before() if self.before is not None else None
            done = self.step()
            loss = prepared if done is None else done
        return loss


@dataclass(frozen=True)
class Quartiles:
    """The median of some ratios, and their quartiles."""

    median: float
    q25: float
    q75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        q25, median, q75 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q25, q75)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.q25:.3f}, {self.q75:.3f}]"


@dataclass
class Row:
    """What was measured of a contender. `wall` are seconds a step, one for each round."""

    name: str
    wall: list[float] = field(default_factory=list)
    missing: str = ""
    """Why it was not measured."""


def ratio(rows: Sequence[Row], name: str, base: str) -> Quartiles:
    """The times of `name` over those of `base` in the same rounds."""
    times = {row.name: row.wall for row in rows}
    return Quartiles.of([mine / other for mine, other in zip(times[name], times[base], strict=True)])


def rotated(count: int, round_number: int) -> list[int]:
    """The order of `count` contenders in a round: each comes first, second, ... equally often."""
    return [(place + round_number) % count for place in range(count)]


def time_steps(contender: Contender, steps: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds a step."""
    begin = clock()
    contender.run(steps)
    return (clock() - begin) / steps


def take_turns(
    contenders: Sequence[Contender],
    rounds: int,
    steps: int,
    time_one: Callable[[Contender, int], float] = time_steps,
) -> list[Row]:
    """`rounds` rounds of `steps` steps each. Garbage is collected between the rounds, not within."""
    rows = [Row(contender.name) for contender in contenders]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for place in rotated(len(contenders), number):
                rows[place].wall.append(time_one(contenders[place], steps))
            gc.collect()
    finally:
        gc.enable()
    return rows


def rounds_within(seconds: float, one_round: float) -> int:
    """How many rounds fit into `seconds`, if each takes `one_round`. Odd, so that the median was measured."""
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / one_round))) | 1


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCES = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 2e-3}
"""Relative, of the loss after warm-up: sums in another order, but the same computation."""


def warm_up(contender: Contender, steps: int) -> tuple[float, str]:
    """Take `steps` steps. Returns the last loss, and the dtypes in which the model's Linear layers computed."""
    seen: set[torch.dtype] = set()
    linears = [module for module in contender.model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [linear.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype)) for linear in linears]
    loss = contender.run(steps)
    for hook in hooks:
        hook.remove()
    names = sorted(str(dtype).removeprefix("torch.") for dtype in seen)
    return float("nan") if loss is None else float(loss.detach()), ", ".join(names)


def find_difference(expected: float, loss: float, dtype: str, precision: str) -> str:
    """Why a contender is not comparable: another loss than the default loop's, or another precision; "" if it is."""
    if not abs(loss - expected) <= TOLERANCES[precision] * abs(expected):
        return f"it computes something else: a loss of {loss:.6g} after warm-up, and {expected:.6g} by the default loop"
    if dtype != DTYPES[precision]:
        return f"it computes in {dtype or 'no Linear layer at all'}, not in {DTYPES[precision]}"
    return ""


Makers = Sequence[tuple[str, Callable[[], Contender]]]


def make_comparable(makers: Makers, precision: str, warm: int) -> tuple[list[Contender], list[Row]]:
    """The contenders that can be made and that compute what the first one computes, after `warm` steps of each; and
    rows that say why the others are missing.

    Raises:
        RuntimeError: one of `REQUIRED` computes something else.
    """
    contenders, missing, expected = [], [], None
    for name, make in makers:
        try:
            contender = make()
            loss, dtype = warm_up(contender, warm)
        except Exception as error:  # another version of a peer may fail in any way
            if name in REQUIRED:
                raise
            missing.append(Row(name, missing=str(error).partition("\n")[0] or type(error).__name__))
            continue
        expected = loss if expected is None else expected
        difference = find_difference(expected, loss, dtype, precision)
        if not difference:
            contenders.append(contender)
        elif name in REQUIRED:
            raise RuntimeError(f"{name}: {difference}")
        else:
            contender.close()
            missing.append(Row(name, missing=difference))
    return contenders, missing
