"""`python -m benchmarks.failure_times`: how long it takes until all ranks have ended, by what went wrong with one."""

from __future__ import annotations

import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from tests.faults.launches import LIMIT_S, TORCHRUN, UNDER_TORCHRUN, Case, failed_at, run_cases, started
from tests.faults.test_failures import CASES, KILL, RAISE, SLEEP

PAGE = Path("benchmarks/results/failures.md")
WAYS = {
    "raises": Case(RAISE),
    "raises, of 2 x 2 ranks": CASES["raises"][0],
    "raises, while the other waits for its device": CASES["blocks"][0],
    "is killed (SIGKILL)": Case(KILL),
    "is killed, of 2 x 2 ranks": CASES["killed"][0],
    "hangs": Case(SLEEP),
    "is stopped (SIGSTOP)": CASES["stopped"][0],
    "leaves its loop early": Case("return"),
}
HEAD = """# How long a failure takes

`python -m benchmarks.failure_times`: seconds from the failure of one rank to the end of the last of the others, or of
torchrun itself. The config key `timeout` is {limit:g} s here; where a rank hangs, nothing is known before it is over. A
rank that does not end by itself is ended 5 s after another has failed. "By itself" is a launcher that ends no ranks
(srun, mpirun).

| one rank | by itself | under torchrun |
|---|---|---|
"""
TAIL = "\n- gloo, 2 cores shared by all ranks; torch {torch}; {date}\n- NCCL was not measured\n"


def under_torchrun(case: Case, folder: Path) -> float:
    with started(*TORCHRUN, case.write(folder, UNDER_TORCHRUN)) as process:
        output, _ = process.communicate(timeout=100)
        return time.monotonic() - failed_at(output)


if __name__ == "__main__":
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for way, case in WAYS.items():
            alone = f"{run_cases({way: case}, Path(folder))[way][2]:.1f}"
            # torchrun starts two ranks here; it does not see that one is stopped, nor that one has ended well.
            takes = case.ranks == 2 and way not in ("is stopped (SIGSTOP)", "leaves its loop early")
            there = f"{under_torchrun(case, Path(folder) / f'{len(rows)}t'):.1f}" if takes else "-"
            rows.append(f"| {way} | {alone} | {there} |\n")
    tail = TAIL.format(torch=torch.__version__.partition("+")[0], date=date.today())
    PAGE.write_text(HEAD.format(limit=LIMIT_S) + "".join(rows) + tail)
