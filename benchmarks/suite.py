"""How long the tests take and how many lines they are, by folder, and which are slowest.

python -m benchmarks.suite --out benchmarks/results/tests.md            # all tests once; `make test-times`
python -m benchmarks.suite --runs 5 --busy                              # for rare failures: the last line of each run

`--busy` keeps one core busy meanwhile. What follows `--` goes to pytest. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .machine import describe, in_one_line, publish, table

ROOT = Path(__file__).resolve().parents[1]
KEPT_IN = "SUITE_DURATIONS"
"""The variable that names the file to which pytest, with this module as a plugin, adds a line for each report."""
SLOWEST = 30


@dataclass(frozen=True)
class Timed:
    """A test that ran: seconds of one worker, with what was prepared for it and ended after it."""

    name: str
    seconds: float
    slow: bool

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def folder(self) -> str:
        """The room: the folder below tests/."""
        parts = Path(self.file).parts
        return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def pytest_runtest_logreport(report: Any) -> None:
    """A hook of pytest: called for each part of a test, where reports of all workers arrive."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[KEPT_IN], "a") as file:
            file.write(json.dumps([report.nodeid, report.duration, "slow" in report.keywords]) + "\n")


def read_times(path: Path) -> list[Timed]:
    """The tests of a run, the slowest first."""
    seconds, slow = defaultdict[str, float](float), set[str]()
    for line in path.read_text().splitlines():
        name, duration, is_slow = json.loads(line)
        seconds[name] += duration
        slow |= {name} if is_slow else set()
    times = [Timed(name, each, name in slow) for name, each in seconds.items()]
    return sorted(times, key=lambda test: -test.seconds)


def run(workers: int, path: Path, options: Sequence[str]) -> tuple[float, str, bool]:
    """All tests once: minutes, pytest's last line, and whether none failed."""
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    command += ["-q", "-p", "benchmarks.suite", *options]
    start = time.perf_counter()
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {KEPT_IN: str(path)}, stdout=subprocess.PIPE, text=True)
    lines = ended.stdout.strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(line, flush=True)
    return (time.perf_counter() - start) / 60, lines[-1].strip("= ") if lines else "", ended.returncode == 0


@contextmanager
def busy() -> Iterator[None]:
    """One core computes meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def count_lines(folder: str) -> int:
    """Of Python in a room; those of tests/ itself without its rooms."""
    path = ROOT / folder
    files = path.glob("*.py") if folder == "tests" else path.rglob("*.py")
    return sum(len(file.read_text().splitlines()) for file in files)


def render(times: Sequence[Timed], minutes: float, last: str, workers: int) -> Iterator[str]:
    """The paragraphs of the page."""
    yield "# How long the tests take"
    yield (
        f"`python -m benchmarks.suite`, {in_one_line(describe())}: all tests in **{minutes:.1f} minutes** with "
        f"{workers} workers. pytest's last line: {last}."
    )
    yield (
        "Seconds of one worker. `make test` leaves out what is marked `slow`. *Lines*: of Python, with helpers; "
        f"`support` is used by several rooms. In all {sum(map(count_lines, folders())):,}."
    )
    rows = []
    for folder in folders():
        own = [test for test in times if test.folder == folder]
        quick, slow = ([test for test in own if test.slow == kind] for kind in (False, True))
        cells = [f"{len(tests)} | {sum(test.seconds for test in tests):.0f}" for tests in (quick, slow)]
        rows.append((f"`{folder}`", f"{count_lines(folder):,}", *cells))
    quick, slow = ([test for test in times if test.slow == kind] for kind in (False, True))
    cells = [f"{len(tests):,} | {sum(test.seconds for test in tests):,.0f}" for tests in (quick, slow)]
    rows.append(("all", f"{sum(map(count_lines, folders())):,}", *cells))
    yield table(("room", "lines", "tests", "s", "slow ones", "s"), rows)
    yield "## The slowest"
    slowest = [(f"`{test.name}`", "slow" if test.slow else "", f"{test.seconds:.0f}") for test in times[:SLOWEST]]
    yield table(("test", "", "s"), slowest)


def folders() -> list[str]:
    """tests/ and its rooms."""
    rooms = (path for path in (ROOT / "tests").iterdir() if any(path.rglob("*.py")) and path.is_dir())
    return ["tests", *sorted(f"tests/{path.name}" for path in rooms)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page; otherwise it is printed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1, help="in a row; the page is of the last one")
    parser.add_argument("--busy", action="store_true", help="beside a process that computes")
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    given = parser.parse_args(arguments)
    passed = True
    with tempfile.TemporaryDirectory() as folder, busy() if given.busy else nullcontext():
        for number in range(given.runs):
            path = Path(folder, str(number))
            minutes, last, is_green = run(given.workers, path, given.options)
            print(f"run {number + 1}: {last}", flush=True)
            passed &= is_green
            if not path.exists():  # pytest did not begin
                return 1
        publish(given.out, *render(read_times(path), minutes, last, given.workers))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
