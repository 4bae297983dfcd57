"""Contenders side by side in one process, and what is kept of a measurement.

Only ratios are reported: each round runs every contender once, in an order that is rotated from round to round, and a
contender's time is divided by that of the first row **of the same round**. What disturbs the machine for longer than a
round falls on all of them. A second copy of the first row (A/A) shows what is left of it: the noise floor.

What is saved are the seconds of each round, so that tables and plots are made again without measuring again.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROUNDS = 9
"""At least, and odd, so that the median is a round that was measured."""

# Names of rows that goals and tables ask for.
LOOP = "hand-written loop"
AGAIN = "hand-written loop again (A/A)"
FUSED = "hand-written loop, fused=True"
BARE = "bare step"
HALFMESH = "halfmesh"
HALFMESH_USED = "halfmesh, with initialize"


REQUIRED = (LOOP, AGAIN, FUSED, HALFMESH)


class Unavailable(Exception):  # noqa: N818 - no error: a row that cannot be measured, with the reason
    """This contender does not take part here; the message says why, and becomes a line of the table."""


@dataclass(frozen=True)
class Contender:
    """One way to take training steps.

    Attributes:
        step: what is timed, with the loss, if it has one.
        model: whose Linears tell the precision that it computes in.
        optimizer: whose step counters are told apart from other reads on the host.
        before: what has to run before each step, outside the timed part.
        note: what the table has to say about it.
        engine: halfmesh's, where there is one.
    """

    name: str
    step: Callable[[], torch.Tensor | None]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    before: Callable[[], torch.Tensor | None] | None = None
    close: Callable[[], None] | None = None
    note: str = ""
    engine: Any = None

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
    """Of the ratios of all rounds."""

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
    """A contender's part of a result. `wall` and `cpu` are seconds a step, one of each round."""

    name: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    dtype: str = ""
    loss: float | None = None
    counts: dict[str, float] = field(default_factory=dict)
    note: str = ""
    missing: str = ""
    """Why it was not measured."""


@dataclass
class Result:
    """One work in one precision, as it is saved."""

    work: str
    title: str
    precision: str
    rows: list[Row]
    clip: float = 0.0
    steps: int = 1
    """Of a round, for each contender."""
    ranks: int = 1
    group: str = "steps"
    """Which section of the report it belongs to."""
    notes: list[str] = field(default_factory=list)
    measured: str = ""
    """By which commit, and when."""

    @property
    def key(self) -> str:
        return "_".join([self.work, self.precision, *(["clip"] if self.clip else [])])

    def row(self, name: str) -> Row | None:
        """The row of that name, if it was measured."""
        return next((row for row in self.rows if row.name == name and row.wall), None)

    def ratios(self, name: str, of: str | None = None, clock: str = "wall") -> Quartiles | None:
        """The times of `name` over those of `of` (by default the first row) in the same rounds, if both are there."""
        row, base = self.row(name), self.row(self.rows[0].name if of is None else of)
        if row is None or base is None:
            return None
        pairs = zip(getattr(row, clock), getattr(base, clock), strict=True)
        return Quartiles.of([mine / other for mine, other in pairs if other > 0] or [float("nan")])

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.key}.json"
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        return cls(**{**data, "rows": [Row(**row) for row in data["rows"]]})


def load(folder: Path) -> list[Result]:
    """All results that were saved there."""
    return [Result.from_dict(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def rotated(count: int, round_number: int) -> list[int]:
    """The order of `count` contenders in a round: each comes first, second, ... equally often."""
    return [(place + round_number) % count for place in range(count)]


def time_block(contender: Contender, steps: int) -> tuple[float, float]:
    """Seconds a step, by the clock and of this process; what `before` takes is left out."""
    if contender.before is None:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            contender.step()
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps
    walls = cpus = 0.0
    for _ in range(steps):
        contender.before()
        wall, cpu = time.perf_counter(), time.process_time()
        contender.step()
        walls, cpus = walls + time.perf_counter() - wall, cpus + time.process_time() - cpu
    return walls / steps, cpus / steps


def take_turns(
    contenders: Sequence[Contender],
    rounds: int,
    steps: int,
    time_one: Callable[[Contender, int], tuple[float, float]] = time_block,
) -> list[Row]:
    """`rounds` rounds of `steps` steps each. Garbage is collected between blocks, not within."""
    rows = [Row(contender.name, note=contender.note) for contender in contenders]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for place in rotated(len(contenders), number):
                wall, cpu = time_one(contenders[place], steps)
                rows[place].wall.append(wall)
                rows[place].cpu.append(cpu)
            gc.collect()
    finally:
        gc.enable()
    return rows


def warm_up(contender: Contender, steps: int) -> tuple[float, str]:
    """Take `steps` steps. Returns the last loss, and the dtypes that the model's Linears computed in."""
    seen: set[torch.dtype] = set()
    linears = [module for module in contender.model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [linear.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype)) for linear in linears]
    loss = contender.run(steps)
    for hook in hooks:
        hook.remove()
    names = sorted(str(dtype).removeprefix("torch.") for dtype in seen)
    return float("nan") if loss is None else float(loss.detach()), ", ".join(names)


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCES = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 2e-3}
"""Relative, of the loss after warm-up: sums in another order, but not another computation."""


def complaint(first_loss: float, loss: float, dtype: str, precision: str) -> str:
    """Why a contender is not measured: it computes something else, or in another precision than the table says."""
    if not abs(loss - first_loss) <= TOLERANCES[precision] * abs(first_loss):
        return f"it computes something else: a loss of {loss:.6g} after warm-up, and {first_loss:.6g} by the first row"
    if dtype != DTYPES[precision]:
        return f"it computes in {dtype or 'no Linear at all'}, not in {DTYPES[precision]}"
    return ""
