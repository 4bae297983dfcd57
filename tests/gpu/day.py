"""The first day with a GPU: steps that are each worth something alone, within minutes, without make and a network.

Nothing here has run on a GPU yet. One GPU shows what tests/simulated_gpu and tests/support/fake_gpu.py cannot: whether
its kernels give the right numbers, the order of streams, where the host really waits, how long steps take and how much
memory. It does not show what ranks send to each other over NCCL: for that it takes two (`halfmesh verify`, and `pytest
--ranks-on nccl`).

Carry what the machine with the GPU lacks. Where there is a network, for its Python (here 3.12, on x86-64):

    P="--python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64"
    python3 -m pip download --no-deps --only-binary=:all: $P --platform manylinux2014_x86_64 --dest .whl \
        pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection typing-extensions torchao==0.18.0

It needs torch 2.11 or later, pydantic, typer, rich, pyyaml, jinja2, numpy, pytest, pytest-timeout, and timm for Vision
Transformers; torchao for fp8. There, from the root of the repository:

    python3 -m pip install -q --no-index --no-deps --target /tmp/site .whl/*.whl
    export PYTHONPATH=$PWD:/tmp/site PYTHONUNBUFFERED=1
    python3 tests/gpu/day.py 0 1 6 2 --seconds 550     # is it right, and as fast as predicted?
    python3 tests/gpu/day.py 4 3 9 5 --seconds 550     # waits, memory, races
    python3 tests/gpu/day.py 7 10 --seconds 550        # layouts over gloo, fp8
    python3 tests/gpu/day.py 8 11 --seconds 550        # compiled
    python3 tests/gpu/day.py 1 --device cpu            # a rehearsal, with the tiniest sizes

Each line is a call of less than ten minutes; with 15 minutes in all, take the first, and then `4 3 --seconds 150`. Each
case says what it found, and packs all pages and logs anew into one archive in `--out` ($OUT, if that is set); at most
two traces lie beside it. A failure is something wrong, and makes the status 1; a finding is a figure that was predicted
otherwise. A case that would begin after the minutes are over is left out, and said to be; if step 0 fails, so are all
others.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import gpu
from benchmarks.machine import describe, publish, table
from halfmesh.utils.log import get_logger
from tests.gpu import day_bench as bench
from tests.gpu import day_cases as cases
from tests.gpu import day_fit as fit

ROOT = Path(__file__).parents[2]
SHORT = 30
"""Seconds in which no suite of tests, and hardly a step, can say anything."""
PATIENCE = 10
"""Of the minutes of a step, in a rehearsal: the CPU is slow, and busy."""


@dataclass
class Page:
    """The table of a step, written anew with each row; then `written` is called."""

    out: Path
    title: str
    failure: str  # what counts as one
    device: torch.device
    seconds: float
    columns: Sequence[str] = ()
    written: Callable[[], None] = lambda: None
    rows: list[Sequence[Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)  # figures that were predicted otherwise
    began: float = field(default_factory=time.monotonic)

    @property
    def rehearses(self) -> bool:
        return self.device.type == "cpu" or "SIMULATED_GPU" in os.environ

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def case(self, name: str, measure: Callable[[], Sequence[Any]]) -> None:
        """Add the row that `measure` returns. An error of one case is a failure, and the next one may do better."""
        if self.left < 0:
            self.add(name, "left out: the minutes are over")
            return
        try:
            self.add(name, *measure())
        except ModuleNotFoundError as error:
            self.add(name, f"left out: {error}")
        except Exception as error:
            self.fail(f"{name}: {in_a_line(error)}")
            self.add(name, in_a_line(error))
        gpu.free()

    def add(self, *row: Any) -> None:
        cells = [*row, *[""] * (len(self.columns) - len(row))]
        print(" | ".join(map(str, cells)), flush=True)
        self.rows.append(cells)
        self.write()

    def fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"FAILURE: {text}", flush=True)

    def find(self, text: str) -> None:
        self.findings.append(text)
        print(f"FINDING: {text}", flush=True)

    def write(self, verdict: str = "not over yet") -> None:
        name = f"a rehearsal on {self.device}" if self.rehearses else torch.cuda.get_device_name()
        about = "\n".join(f"- {key}: {value}" for key, value in ({"device": name} | describe()).items())
        kinds = (("FAILURE", self.failures), ("FINDING", self.findings))
        found = "\n".join(f"- {kind}: {text}" for kind, texts in kinds for text in texts)
        parts = [f"# {self.title}", f"A failure is: {self.failure}", about, table(self.columns, self.rows), found]
        publish(self.out, *filter(None, parts), f"This step is {verdict}.")
        self.written()


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# -- steps that run what there is already ------------------------------------------------------------------------------


def run_pytest(page: Page, name: str, *arguments: str, seconds: float = 0.0, **environment: str) -> None:
    """A row with pytest's last line. It is a failure if a test fails, or if none passes where it should.

    Args:
        seconds: after these it is interrupted, which is no failure as long as its tests passed; 0: all that are left.
    """
    seconds = min(page.left, seconds or page.left)
    if seconds < SHORT:
        page.add(name, "-", "left out: the minutes are over")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfEs", "--timeout", "120", *arguments]
    log = page.out.with_suffix(f".{len(page.rows)}.log")
    with open(log, "w") as file:
        env = os.environ | environment
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = 124
            process.send_signal(signal.SIGINT)  # then pytest says what it has found
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
    lines = log.read_text().strip().splitlines() or [""]
    marks = "".join(re.findall(r"^([.FEsxX]+)(?:\s+\[ *\d+%\])?$", "\n".join(lines), re.MULTILINE))
    has_failed = status not in (0, 124) or bool(set(marks) & {"F", "E"})
    has_passed = "." in marks or (page.rehearses and "s" in marks)
    if has_failed or not has_passed:
        page.fail(f"{name}: pytest ended with status {status}, see {log.name}: {lines[-1]}")
    page.add(name, "out of time" if status == 124 else status, lines[-1])


def tests_on_gpu(page: Page) -> None:
    page.columns = ["tests", "status", "result"]
    has_two = page.rehearses or torch.cuda.device_count() > 1
    others = {"test_day.py", "test_one_rank.py", "" if has_two else "test_cpu_offload.py"}
    for file in sorted((ROOT / "tests/gpu").glob("test_*.py"), key=lambda file: file.name != "test_on_gpu.py"):
        if file.name not in others:
            run_pytest(page, file.name, "-m", "gpu", str(file))


# Few of each kind; and gloo sends between stages from the host only.
LAYOUTS = "(mlp or gpt) and not gpt2 and not fp8 and not pp"
ONE_RANK = {"what one rank sends to itself over NCCL": ["tests/gpu/test_one_rank.py"]}
SUITES = {
    "layouts beside one process": ["tests/composition/test_parity.py", "-m", "not slow", "-k", LAYOUTS],
    "zero1 beside one process": ["tests/parity/test_sharding.py", "-m", "not slow", "-k", "zero1"],
    "fsdp beside one process": ["tests/parity/test_sharding.py", "-m", "not slow", "-k", "odd and fsdp"],
}
FEW = {"a layout": ["tests/composition/test_parity.py", "-m", "not slow", "-k", "none-mlp-tp2-dp2-x1-fsdp"]}


def ranks_on_one_gpu(page: Page, suites: Mapping[str, Sequence[str]] = SUITES, place: str = "gloo-cuda") -> None:
    page.columns = [f"ranks on {place}", "status", "result"]
    place = "gloo-cpu" if page.device.type == "cpu" else place
    suites = FEW if suites is SUITES and page.rehearses else suites
    for left, (name, arguments) in zip(range(len(suites), 0, -1), suites.items(), strict=True):
        run_pytest(page, name, *arguments, seconds=max(page.left / left, SHORT), RANKS_ON=place)


# -- the program -------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    title: str
    minutes: float
    failure: str
    run: Callable[[Page], None]


SLOWER, RED = bench.SPEED_FAILURE, "a test that fails, a file of which no test passed, or pytest that does not end."
STEPS = {
    0: Step("Is this machine fit, and halfmesh verify --quick", 1.5, fit.FIT_FAILURE, fit.find_what_is_unfit),
    1: Step("The tests that need a GPU", 2.5, RED, tests_on_gpu),
    2: Step("Steps and updates beside loops by hand", 4.5, SLOWER, bench.bench_eager),
    3: Step("How large the parts of an update are to be", 2, cases.SWEEP_FAILURE, cases.sweep_buckets),
    4: Step("Where a training loop waits", 1.5, cases.PROFILE_FAILURE, cases.profile_loops),
    5: Step("Copies beside the computation", 4, cases.RACE_FAILURE, cases.find_races),
    6: Step("NCCL with one rank", 1, RED, partial(ranks_on_one_gpu, suites=ONE_RANK, place="nccl-one")),
    7: Step("Several ranks on one GPU", 5, RED, ranks_on_one_gpu),
    8: Step("Compiled steps beside compiled loops", 4.5, SLOWER, bench.bench_compiled),
    9: Step("A loss without all logits at once", 1, cases.LOSS_FAILURE, cases.losses_of_a_head),
    10: Step("fp8 beside bf16", 4, SLOWER, bench.bench_float8),
    11: Step("Compiled steps in CUDA graphs", 4.5, SLOWER, partial(bench.bench_compiled, mode="reduce-overhead")),
}


def pack(pages: Path, out: Path) -> None:
    """Pages and logs into one file, traces beside it; anew, so that a command that is killed has left all before."""
    for trace in pages.glob("*.json.gz"):
        shutil.move(trace, out.parent / trace.name)
    packed = pages.with_name(out.name)
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(pages, packed.name.partition(".")[0])
    shutil.move(packed, out)


def take(number: int, step: Step, device: torch.device, until: float, pages: Path, archive: Path) -> Page:
    """Run a step within its minutes and before `until`, on the monotonic clock."""
    left = until - time.monotonic()
    out, title = pages / f"step_{number}.md", f"Step {number}: {step.title}"
    written = partial(pack, pages, archive)
    page = Page(out, title, step.failure, device, min(60 * step.minutes, left), written=written)
    if page.rehearses:
        page.seconds *= PATIENCE
    print(f"\n{page.title}\nA failure is: {page.failure}", flush=True)
    if left < SHORT:
        page.columns = ["step"]
        page.add("left out: the minutes are over")
        return page
    try:
        step.run(page)
    except Exception as error:
        page.fail(in_a_line(error))
    gpu.free()
    page.write(f"over, in {time.monotonic() - page.began:.0f} s, with {len(page.failures)} failure(s)")
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products give the same bits each time
    names = "\n".join(f"  {number}  {step.title} ({step.minutes:g} min)" for number, step in STEPS.items())
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"steps:\n{names}", formatter_class=form)
    parser.add_argument("steps", type=int, choices=list(STEPS), nargs="+", metavar="STEP")
    parser.add_argument("--seconds", type=float, help="of all steps together (default: the sum of their minutes)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    out = Path(os.environ.get("OUT") or ROOT / "runs/gpu_day")
    parser.add_argument("--out", type=Path, default=out, help="folder of the archive and the traces (default: $OUT)")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if chosen.device == "cuda" else torch.device("cpu")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was run (--device cpu is a rehearsal)")
        return 2
    get_logger().logger.setLevel(logging.WARNING)  # what is printed is to be short
    chosen.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + (chosen.seconds or sum(60 * STEPS[number].minutes for number in chosen.steps))
    pages, archive = list[Page](), chosen.out / f"day_{'_'.join(map(str, chosen.steps))}.tar.gz"
    with tempfile.TemporaryDirectory() as temporary:
        (folder := Path(temporary, "pages")).mkdir()
        for number in chosen.steps:
            pages.append(take(number, STEPS[number], device, until, folder, archive))
            if number == 0 and pages[-1].failures:
                break
    print()
    for page in pages:
        print(f"{page.title}: {len(page.failures)} failure(s), {len(page.findings)} finding(s)")
        for text in (*page.failures, *page.findings):
            print(f"  {text}")
    for number in chosen.steps[len(pages) :]:
        print(f"Step {number}: left out, because step 0 has failed")
    print(f"the pages are in {archive}")
    return int(any(page.failures for page in pages))


if __name__ == "__main__":
    sys.exit(main())
