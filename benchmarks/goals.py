"""What halfmesh should reach, and whether what was measured does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .harness import AGAIN, BARE, FUSED, HALFMESH, LOOP, Quartiles, Result

IMPORT_RATIO = 1.05
CONSTRUCTION_S = 2.0
STEP_RATIOS = {
    "mlp_fp16_clip": 0.50,
    "mlp_fp32": 0.45,
    "mlp_bf16": 0.65,
    "transformer_fp32": 0.95,
    "transformer_bf16": 0.95,
    "vit_fp32": 0.91,
    "vit_bf16": 0.91,
    "naive_tail_fp16_clip": 0.25,
    "dp2_accumulation4_fp32": 0.97,
    "dp2_accumulation4_bf16": 0.97,
}
"""Time over the first row's."""
CALLS_RATIO = 0.35


@dataclass(frozen=True)
class Goal:
    """A line of the table. `measured` is None where there is no measurement."""

    figure: str
    limit: float
    measured: float | None
    shown: str = ""
    unit: str = ""

    @property
    def reached(self) -> str:
        if self.measured is None:
            return "not measured"
        return "yes" if self.measured <= self.limit else "no"


def _of(figure: str, limit: float, ratio: Quartiles | None) -> Goal:
    return Goal(figure, limit, ratio.median if ratio else None, str(ratio or ""))


def judge(results: Sequence[Result]) -> list[Goal]:
    """All goals, in the order of the table."""
    by_key = {result.key: result for result in results}
    return [*_ratios(by_key), *_against_fused(results), *_counted(by_key, results), *_before_the_first_step(by_key)]


def _ratios(by_key: dict[str, Result]) -> Iterator[Goal]:
    for key, limit in STEP_RATIOS.items():
        result = by_key.get(key)
        ratio, bare = (result.ratios(HALFMESH), result.ratios(BARE)) if result else (None, None)
        goal = _of(f"{key}: time over the hand-written loop's", limit, ratio)
        yield goal if bare is None else dataclasses.replace(goal, shown=f"{goal.shown}; {BARE} {bare}")


def _against_fused(results: Sequence[Result]) -> Iterator[Goal]:
    """Nobody should be faster with one flag; what the first row differs by from itself is allowed."""
    for result in results:
        ratio, noise = result.ratios(HALFMESH, FUSED), result.ratios(AGAIN)
        if ratio is not None and noise is not None:
            limit = max(1.0, noise.q75)
            yield _of(f"{result.key}: time over the same loop's with fused=True", limit, ratio)


def _counted(by_key: dict[str, Result], results: Sequence[Result]) -> Iterator[Goal]:
    mlp = by_key.get("mlp_fp16_clip")
    calls = {name: row.counts["Python calls"] for name in (LOOP, HALFMESH, BARE) if mlp and (row := mlp.row(name))}
    shares = {name: count / calls[LOOP] for name, count in calls.items()} if LOOP in calls else {}
    bare = f"{BARE} {shares[BARE]:.3f}" if BARE in shares else ""
    yield Goal(
        "mlp_fp16_clip: Python calls a step over the hand-written loop's", CALLS_RATIO, shares.get(HALFMESH), bare
    )
    # Under a tensor group and a pipeline what is read lives on the host on any device (a seed, a microbatch's number),
    # which a run on a CPU cannot tell apart.
    counted = [result for result in results if result.group in ("steps", "tail") or result.work.startswith("dp")]
    steps = [(result.key, result.row(HALFMESH)) for result in counted]
    reads = {key: row.counts["host reads"] + row.counts["step counter reads"] for key, row in steps if row is not None}
    at_times = {key: row.counts.get("most host reads", 0) for key, row in steps if row is not None}
    where = ", ".join(f"{key} {count:g}" for key, count in reads.items() if count)
    rare = ", ".join(f"{key} {count:g}" for key, count in at_times.items() if count > reads[key])
    where = "; ".join(filter(None, [where, rare and f"at times: {rare}"]))
    most = max(reads.values(), default=None)
    yield Goal("host reads in the median step, one process and data parallel", 0, most, where)


def _before_the_first_step(by_key: dict[str, Result]) -> Iterator[Goal]:
    imports, construction = by_key.get("import_none"), by_key.get("construction_none")
    ratio = imports.ratios(HALFMESH) if imports else None
    yield _of("`import halfmesh` after torch, over torch alone", IMPORT_RATIO, ratio)
    for row in construction.rows if construction else []:
        yield Goal(f"{row.name}: making an engine", CONSTRUCTION_S, row.counts["seconds"], unit=" s")
    if construction is None:
        yield Goal("making an engine", CONSTRUCTION_S, None, unit=" s")


def table(goals: Sequence[Goal]) -> str:
    lines = ["| figure | goal | measured | reached |", "|---|---|---|---|"]
    for goal in goals:
        measured = "-" if goal.measured is None else f"{goal.measured:.3g}{goal.unit}"
        if goal.shown and goal.measured is not None:
            measured = goal.shown if goal.measured and "[" in goal.shown else f"{measured} ({goal.shown})"
        lines.append(f"| {goal.figure} | <= {goal.limit:.4g}{goal.unit} | {measured} | {goal.reached} |")
    return "\n".join(lines)
