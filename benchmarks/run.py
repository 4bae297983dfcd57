"""Measures everything, one process per work, and writes the report and the plot.

python -m benchmarks                              # all of it: 20 minutes or so on 2 cores
python -m benchmarks --works mlp tail --quick     # a look
python -m benchmarks --works dp --precisions fp32
python -m benchmarks --report                     # table and plot again, from what was measured before
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .harness import ROUNDS, Result

HERE = Path(__file__).parent
PRECISIONS = ["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Case:
    """One result. `slow` are those whose steps take so long that fewer rounds have to do."""

    work: str
    precision: str = "none"
    clip: float = 0.0
    slow: bool = False

    @property
    def key(self) -> str:
        return "_".join([self.work, self.precision, *(["clip"] if self.clip else [])])


def _steps(work: str) -> list[Case]:
    return [Case(work, "fp32"), Case(work, "bf16"), Case(work, "fp16", 1.0, slow=work != "mlp")]


# By the name that --works knows them under.
WORKS = {
    "mlp": [*_steps("mlp"), Case("mlp", "fp32", 1.0)],
    "transformer": _steps("transformer"),
    "vit": _steps("vit"),
    "tail": [Case("naive_tail", "fp16", 1.0)],
    "dp": [Case(f"dp2{more}", precision) for more in ("", "_accumulation4") for precision in ("fp32", "bf16")],
    "sharded": [Case("zero1_2", "fp32"), Case("fsdp_2", "fp32")],
    "tensor": [Case("tensor2", "fp32")],
    "pipeline": [Case("pipeline2", "fp32")],
    "checkpoints": [Case("checkpoints", slow=True)],
    "startup": [Case("import", slow=True), Case("construction", slow=True)],
}


def measure(case: Case, rounds: int, quick: bool) -> Result:
    """In this process (and, for several ranks, in those that it starts)."""
    # Imported here, so that the process that only starts others stays small.
    if case.work == "import":
        from .startup import measure_imports

        return measure_imports(rounds)
    if case.work == "construction":
        from .startup import measure_construction

        return measure_construction(min(rounds, 5), quick)
    if case.work == "checkpoints":
        from .checkpoint_times import measure_checkpoints

        return measure_checkpoints(rounds, quick)
    if case.work == "naive_tail":
        from . import naive_tail

        return naive_tail.measure(rounds, quick)
    from . import distributed, single

    if case.work in distributed.LAYOUTS:
        return distributed.measure(case.work, case.precision, rounds, quick)
    return single.measure(case.work, case.precision, case.clip, rounds, quick)


def measure_all(
    cases: list[Case], rounds: int, quick: bool, raw: Path, say: Callable[[str], None] = print
) -> list[str]:
    """Each case in a fresh process: what one engine leaves in a process would change the next measurement.

    Returns:
        The keys of those that failed. What was saved of them by an earlier run is removed.
    """
    failed = []
    for case in cases:
        begin = time.monotonic()
        # -c and not -m: mp.spawn imports the main module again, and finds this one then.
        code = f"from benchmarks.run import one; one({case!r}, {rounds}, {quick}, {str(raw)!r})"
        code = code.replace("Case(", "__import__('benchmarks.run').run.Case(")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _with_root()}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        if done.returncode:
            failed.append(case.key)
            (raw / f"{case.key}.json").unlink(missing_ok=True)
            say(done.stderr[-3000:])
        say(f"{case.key}: {'FAILED' if done.returncode else 'measured'} in {time.monotonic() - begin:.0f} s")
    return failed


def one(case: Case, rounds: int, quick: bool, raw: str) -> None:
    """What each of those processes does."""
    from .machine import stamp

    result = measure(case, rounds, quick)
    described = Path(raw) / "machine.txt"
    result.measured = stamp(json.loads(described.read_text())) if described.exists() else ""
    result.save(Path(raw))


def _with_root() -> str:
    return os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="for a processor without bf16, say"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help=f"odd, and at least {ROUNDS} (default: 15; slow ones: 9)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few and short rounds: to see that it works, not to report"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing; write report and plot again")
    parser.add_argument(
        "--out", type=Path, help="where raw numbers and plot go, the report beside it (default: benchmarks/results)"
    )
    chosen = parser.parse_args()
    if chosen.out is None:  # a quick look does not replace a measurement
        chosen.out = HERE.parent / "runs" / "benchmarks" / "results" if chosen.quick else HERE / "results"
    if chosen.rounds < ROUNDS or chosen.rounds % 2 == 0:
        parser.error(f"--rounds {chosen.rounds}: give an odd number of at least {ROUNDS}")
    asked = (*chosen.precisions, "none")
    cases = [case for name in chosen.works for case in WORKS[name] if case.precision in asked]
    if not cases:
        parser.error(
            f"{' '.join(chosen.works)} is not measured in {' '.join(chosen.precisions)}; leave --precisions out"
        )
    raw = chosen.out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    if not chosen.report:
        from .machine import describe

        (raw / "machine.txt").write_text(json.dumps(describe(chosen.quick), indent=1) + "\n")
        for slow in (False, True):
            rounds = 3 if chosen.quick else ROUNDS if slow else chosen.rounds
            failed += measure_all([case for case in cases if case.slow == slow], rounds, chosen.quick, raw)
    from .plot import draw
    from .report import write

    draw(raw, chosen.out / "speed.png")
    print(f"written: {write(raw, chosen.out, failed)}")
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")
