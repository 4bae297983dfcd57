"""Steps 2, 8, 10 and 11 of `day.py`: `benchmarks.gpu`, and what counts as a failure or a finding in its rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks import gpu

if TYPE_CHECKING:
    from .day import Page

SLOWER, UNEXPECTED = 1.05, 0.1
SPEED_FAILURE = f"halfmesh takes more than {SLOWER} of the time of the loop with fused=True, a wait in its step, or a "
SPEED_FAILURE += "case that was not measured for another reason than the time or a package."


def judge(page: Page, rows: Sequence[Sequence[Any]]) -> None:
    """Find failures and findings in the rows of a case of `benchmarks.gpu`."""
    against, predicted, waits = map(gpu.COLUMNS.index, ("against fused=True", "predicted", "waits a step"))
    again = max([row[against].median for row in rows if row[3] == gpu.AGAIN], default=1.0)
    for row in rows:
        case = ", ".join(map(str, row[:3]))
        if str(row[3]).startswith("not measured") and not re.search("TimeoutError|ModuleNotFoundError", row[3]):
            page.fail(f"{case}: {row[3]}")
        if row[3] != gpu.HALFMESH or page.rehearses:  # a tiny model on a busy CPU says nothing
            continue
        is_slower = row[against].q25 > SLOWER * max(again, 1.0)
        if row[predicted] == "-":  # O1 and fp8 are not promised to be as fast
            is_unexpected = is_slower
        else:
            is_unexpected = abs(row[against].median / float(row[predicted]) - 1) > UNEXPECTED
            if is_slower:
                page.fail(f"{case}: {row[against]} of the loop with fused=True")
        if is_unexpected:
            page.find(f"{case}: {row[against]} of the loop with fused=True, and {row[predicted]} was predicted")
        if set(row[waits]) - set("0, -"):
            page.fail(f"{case}: {row[waits]} waits a step")


def bench(page: Page, cases: Sequence[gpu.Case]) -> None:
    """`benchmarks.gpu`, whose page stands beside this one."""
    page.columns = gpu.COLUMNS
    rounds, beside = 2 if page.rehearses else 5, page.out.with_suffix(".bench.md")

    def done(rows: Sequence[Sequence[Any]]) -> None:
        judge(page, rows)
        for row in rows:
            page.add(*row)

    gpu.run(cases, page.device, rounds, beside, seconds=page.left, done=done)


def cases_of(page: Page, works: Sequence[str], modes: Sequence[str], how: Any = False) -> list[gpu.Case]:
    """Works and modes by name, in that order for each mode. A rehearsal has the tiny GPT and the first mode."""
    if page.rehearses:
        works, modes = ["tiny GPT"], modes[:1]
    known, named = {work.title: work for work in (*gpu.WORKS, *gpu.TINY)}, {mode.name: mode for mode in gpu.MODES}
    found = [next(work for title, work in known.items() if words in title) for words in works]
    return [(work, named[mode], how) for mode in modes for work in found]


MODES = ["NAIVE fp16", "TORCH bf16", "NAIVE bf16", "TORCH fp16", "APEX O2"]


def bench_eager(page: Page) -> None:
    cases = cases_of(page, ["batch 128", "124 M", "batch 32", "1.5 B", "355 M"], MODES)
    if not page.rehearses:
        cases += cases_of(page, ["124 M"], ["fp32"]) + cases_of(page, ["batch 32"], ["APEX O1"])
    bench(page, cases)


def bench_compiled(page: Page, mode: str = "default") -> None:
    how = {"backend": "aot_eager"} if page.rehearses else {"mode": mode}
    bench(page, cases_of(page, ["124 M"], ["NAIVE bf16", "TORCH bf16"], how))


def bench_float8(page: Page) -> None:
    if find_spec("torchao") is None:
        page.columns = gpu.COLUMNS
        page.add("fp8", "left out: torchao is not here")
        return
    eager = cases_of(page, ["355 M"], ["fp8, tensorwise"])
    compiled = {"backend": "aot_eager"} if page.rehearses else True
    bench(page, eager + cases_of(page, ["355 M"], ["fp8, tensorwise", "fp8, rowwise"], compiled))
