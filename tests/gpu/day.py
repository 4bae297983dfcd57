"""The first day with a GPU: ten steps, each alone, within its minutes, without make and without a network.

Nothing here has run on a GPU yet. One GPU shows whether kernels give the right numbers, the order of streams, where the
host waits, how long steps take and how much memory. It does not show what ranks send to each other over NCCL: for that
it takes two (`halfmesh verify`, and `pytest --ranks-on nccl`).

Where there is a network, for the Python and the torch (2.11 or later) of the machine with the GPU:

    pip download --dest wheels pydantic pyyaml rich typer pytest pytest-timeout

There, from the root of the repository:

    python3 -m pip install --no-index --no-deps --target packages wheels/*.whl
    export PYTHONPATH=$PWD:$PWD/packages
    python3 tests/gpu/day.py 0                   # and so on to 9; what is worth most comes first
    python3 tests/gpu/day.py 1 --device cpu      # a rehearsal, with the tiniest sizes

Each step writes its table into `--out` after every case, and says there what is a failure. The status is 1 if it found
one. A case that would begin after the minutes are over is left out, and said to be.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.machine import describe, publish, table

ROOT = Path(__file__).parents[2]


@dataclass
class Page:
    """The table of a step, written anew with each row.

    Attributes:
        failure: what counts as one.
        failures: those that were found.
    """

    out: Path
    title: str
    failure: str
    device: torch.device
    seconds: float
    columns: Sequence[str] = ()
    rows: list[Sequence[Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def rehearses(self) -> bool:
        return self.device.type == "cpu" or "SIMULATED_GPU" in os.environ

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.began)

    def case(self, name: str, measure: Callable[[], Sequence[Any]]) -> None:
        """Add the row that `measure` returns. An error of one case is a failure, and the next one may do better."""
        if self.left < 0:
            self.add(name, "left out: the minutes are over")
            return
        try:
            self.add(name, *measure())
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self.fail(f"{name}: {text}")
            self.add(name, text)
        gpu.free()

    def add(self, *row: Any) -> None:
        cells = [*row, *[""] * (len(self.columns) - len(row))]
        print(" | ".join(map(str, cells)), flush=True)
        self.rows.append(cells)
        self.write()

    def fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"FAILURE: {text}", flush=True)

    def write(self, verdict: str = "not over yet") -> None:
        name = f"a rehearsal on {self.device}" if self.rehearses else torch.cuda.get_device_name()
        about = "\n".join(f"- {key}: {value}" for key, value in ({"device": name} | describe()).items())
        found = "\n".join(f"- FAILURE: {text}" for text in self.failures)
        parts = [f"# {self.title}", f"A failure is: {self.failure}", about, table(self.columns, self.rows), found]
        publish(self.out, *filter(None, parts), f"This step is {verdict}.")


# -- steps that run what there is already ------------------------------------------------------------------------------


def run_pytest(page: Page, name: str, *arguments: str, **environment: str) -> None:
    """A row with pytest's last line. On a GPU a run in which no test passed is a failure, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfEs", *arguments]
    log = page.out.with_suffix(f".{len(page.rows)}.log")
    with open(log, "w") as file:
        try:
            env = os.environ | environment
            status = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=file, timeout=page.left).returncode
        except subprocess.TimeoutExpired:
            status = 124
    lines = log.read_text().strip().splitlines()
    if status not in (0, 5) or ("passed" not in lines[-1] and not page.rehearses):
        page.fail(f"{name}: pytest ended with status {status}, see {log}")
    page.add(name, status, lines[-1] if lines else "")


def verify_here(page: Page) -> None:
    """`halfmesh verify`, as a user runs it."""
    from halfmesh.verify.machine import verify_machine

    page.columns = ["mode", "layout", "ranks", "seconds", "result"]
    for cell, report, seconds in verify_machine(page.device.type, quick=page.rehearses).results:
        if not report.equal:
            page.fail(f"{cell.row}, {cell}: {report.first or report.problems}")
        result = "equal" if report.equal else "differs, or refused"
        page.add(cell.row, cell, report.world_size, f"{seconds:.1f}", result)


def tests_on_gpu(page: Page) -> None:
    page.columns = ["tests", "status", "result"]
    files = [file for file in sorted((ROOT / "tests/gpu").glob("test_*.py")) if file.name != "test_day.py"]
    needs_two = "test_cpu_offload_on_gpu.py"
    for file in files:
        if file.name != needs_two or page.rehearses or torch.cuda.device_count() > 1:
            run_pytest(page, file.name, "-m", "gpu", str(file))


# Models of timm and transformers, and torchao, are not carried; gloo sends between stages from the host only.
LAYOUTS = "(mlp or gpt) and not gpt2 and not fp8 and not pp"
SUITES = {
    "layouts beside one process": ["tests/composition/test_parity.py", "-m", "not slow", "-k", LAYOUTS],
    "zero1 beside one process": ["tests/parity/test_sharding.py", "-m", "not slow", "-k", "zero1"],
    "fsdp beside one process": ["tests/parity/test_sharding.py", "-m", "not slow", "-k", "odd and fsdp"],
}


def two_ranks_on_one_gpu(page: Page) -> None:
    page.columns = ["two or more ranks on one device, over gloo", "status", "result"]
    place = "gloo-cpu" if page.device.type == "cpu" else "gloo-cuda"
    for name, arguments in [*SUITES.items()][: 1 if page.rehearses else None]:
        rehearsed = ["-k", "trains_to and none-mlp"] if page.rehearses else []
        run_pytest(page, name, *arguments, *rehearsed, RANKS_ON=place)


SLOWER = 1.05


def judge(page: Page, rows: Sequence[Sequence[Any]]) -> None:
    """Find failures in the rows of `benchmarks.gpu`."""
    against, waits = gpu.COLUMNS.index("against fused=True"), gpu.COLUMNS.index("waits a step")
    for row in rows:
        case = ", ".join(map(str, row[:3]))
        if str(row[3]).startswith("not measured") and "TimeoutError" not in row[3]:
            page.fail(f"{case}: {row[3]}")
        if row[3] == gpu.HALFMESH and not page.rehearses:  # a tiny model on a busy CPU says nothing
            if float(str(row[against]).split()[0]) > SLOWER:
                page.fail(f"{case}: {row[against]} of the loop with fused=True")
            if set(row[waits]) - set("0, -"):
                page.fail(f"{case}: {row[waits]} waits a step")


def bench(page: Page, works: Sequence[str], modes: Sequence[gpu.Mode], compiled: Sequence[Any]) -> None:
    """`benchmarks.gpu`, whose page stands beside this one."""
    page.columns = gpu.COLUMNS
    chosen = gpu.TINY[1:] if page.rehearses else [work for work in gpu.WORKS if any(w in work.title for w in works)]
    rounds, beside = 2 if page.rehearses else 5, page.out.with_suffix(".bench.md")

    def done(rows: Sequence[Sequence[Any]]) -> None:
        judge(page, rows)
        for row in rows:
            page.add(*row)

    gpu.run(chosen, modes, compiled, page.device, rounds, beside, seconds=page.left, done=done)


def bench_eager(page: Page) -> None:
    modes = [mode for mode in gpu.MODES if mode.name == "NAIVE fp16"] if page.rehearses else gpu.MODES
    bench(page, ["124 M", "355 M", "1.5 B"], modes, (False,))


def bench_compiled(page: Page) -> None:
    modes = [mode for mode in gpu.MODES if mode.name in ("TORCH bf16", "NAIVE bf16")]
    forms = [{"backend": "aot_eager"}] if page.rehearses else [{"mode": "default"}, {"mode": "reduce-overhead"}]
    bench(page, ["124 M"], modes[: 1 if page.rehearses else 2], forms)


# -- the program -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    title: str
    minutes: float
    failure: str
    run: Callable[[Page], None]


def all_steps() -> dict[int, Step]:
    from tests.gpu import day_cases as cases
    from tests.gpu import day_one_rank

    slower = f"halfmesh takes more than {SLOWER} of the time of the loop with fused=True, a wait in its step, or a "
    slower += "case that was not measured for another reason than the time."
    red = "a test that fails, a file of which no test passed, or pytest that does not end in time."
    unequal = "a mode in a layout that does not compute what one process computes."
    return {
        0: Step("halfmesh verify", 8, unequal, verify_here),
        1: Step("The tests that need a GPU", 4, red, tests_on_gpu),
        2: Step("Steps and updates beside loops by hand", 8, slower, bench_eager),
        3: Step("How large the parts of an update are to be", 4, cases.SWEEP_FAILURE, cases.sweep_buckets),
        4: Step("Where a training loop waits", 3, cases.PROFILE_FAILURE, cases.profile_loops),
        5: Step("Copies beside the computation", 5, cases.RACE_FAILURE, cases.find_races),
        6: Step("NCCL with one rank", 3, day_one_rank.COLLECTIVES_FAILURE, day_one_rank.one_rank),
        7: Step("Several ranks on one GPU", 6, red, two_ranks_on_one_gpu),
        8: Step("Compiled steps beside compiled loops", 8, slower, bench_compiled),
        9: Step("channels_last and cuDNN's LSTM", 2, cases.LAYOUT_FAILURE, cases.memory_layouts),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products give the same bits each time
    steps = all_steps()
    names = "\n".join(f"  {number}  {step.title} ({step.minutes:g} min)" for number, step in steps.items())
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"steps:\n{names}", formatter_class=form)
    parser.add_argument("step", type=int, choices=list(steps))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu_day", help="folder of the tables")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was run (--device cpu is a rehearsal)")
        return 2
    step = steps[chosen.step]
    chosen.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", 0) if chosen.device == "cuda" else torch.device("cpu")
    out = (chosen.out / f"step_{chosen.step}.md").absolute()
    page = Page(out, f"Step {chosen.step}: {step.title}", step.failure, device, 60 * step.minutes)
    print(f"{page.title}\nA failure is: {page.failure}", flush=True)
    step.run(page)
    page.write(f"over, in {time.monotonic() - page.began:.0f} s, with {len(page.failures)} failure(s)")
    print(f"{len(page.failures)} failure(s); the table is in {page.out}")
    return int(bool(page.failures))


if __name__ == "__main__":
    sys.exit(main())
