"""Tables of what was measured, with how to read them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from .goals import judge, table
from .harness import FUSED, Quartiles, Result, Row, load
from .machine import stamp

SECTIONS = {
    "steps": (
        "Steps of one process",
        "A step is forward, loss, backward and update of one fixed batch. fp16 with clipping at 1.0 and dynamic loss "
        "scale; fp32 and bf16 without clipping, but where it says so.",
    ),
    "tail": (
        "The update alone, in fp16 with fp32 masters",
        "From gradients that are there to new weights. By hand: copy each to fp32 and unscale, look for inf and nan, "
        "norm, clip at 1.0, AdamW, copy back; one tensor after the other, and with torch's foreach functions.",
    ),
    "layouts": (
        "Steps of two processes",
        "Beside what torch has for it: DistributedDataParallel (with no_sync() while gradients add up), "
        "parallelize_module, torch.distributed.pipelining. gloo, both processes on this machine. The time is that of "
        "the slower rank, and so is each count. What halfmesh reads under a tensor group and a pipeline lives on the "
        "host on any device: a seed (on a CPU only), and the number of a microbatch.",
    ),
    "checkpoints": (
        "Saving and loading",
        "How long the loop waits, in one process. Saves over torch.save of the same state, which does not wait for the "
        "disk (no fsync) and takes no checksums; loads over torch.load and load_state_dict, which compare none. A save "
        "in the background is what the loop waits for; it is written before the next row begins.",
    ),
    "import": ("Import", ""),
    "construction": ("Making an engine", ""),
}
_READING = """## How to read it

- **Ratios.** All contenders of a table live in one process and take turns, in an order that is rotated each round. A
  number is a contender's time over that of the first row *in the same round*: the median of all rounds, and in brackets
  the quartiles. Below 1 is faster. Times are orientation only.
- **A/A** is the first row a second time: the same loop, model, batch. What it differs from 1 is the noise of this
  machine; smaller differences between rows mean nothing.
- **The first row** has torch's default flags: AdamW goes through one tensor after the other on a CPU. The row with
  `fused=True` is one flag away from it, and has its own column.
- **Bare step** is the least that a step can be made of with torch's public functions: forward, backward, and AdamW's
  fused kernel through its functional form, on lists made once. It checks, scales and clips nothing, so no engine can be
  faster; a goal below it cannot be reached without private functions of torch.
- **Same work.** Every contender has a copy of the same weights. A contender whose loss after warm-up differs, or whose
  Linear layers return another dtype than the table says, is not measured.
- **Python calls** are those that cProfile counts, built-in functions included. **Operators** are what reaches torch's
  dispatcher below autograd. **Host reads** are values of tensors that Python got (`.item()` and the like): on a GPU
  each waits for it. Reads of the optimizer's step counters are given apart, after a plus: they live on the host. All
  three are those of the median step; *at times* is the most of any step (101 of the MLP are looked at, 4 or fewer of
  the others: halfmesh looks at its verdicts once in `max_consecutive_skips` updates, 50 by default).
- **Bytes a parameter**: storages that operators made since before the model was made and that somebody still holds,
  after a step (*kept*: weights, gradients, masters, optimizer state) and at most within one (*peak*: activations, too).
  What a kernel allocates and frees within itself is not seen.
- **Bytes between ranks** are those that this rank hands to collectives that sum, or sends, in one update.
- A peer's import may set environment variables for the whole process; they are taken back, since one of them
  (PYTORCH_NVML_BASED_CUDA_CHECK) slows down everybody's optimizer where torch is built for CUDA and there is no GPU."""
_NOT_MEASURED = """## What was not measured

- GPUs: `make bench-gpu` does, see [results/gpu.md](results/gpu.md). fp16 products are emulated on most CPUs, so that in
  fp16 the engine's part of a step all but vanishes in the larger models here.
- Several machines, real networks, and more than 2 ranks: this machine has few cores.
  So nothing can overlap here: while a rank sends, another needs the core. What is under way when is counted in tests.
- Fabric and DeepSpeed with several ranks."""


def write(raw: Path, out: Path, failed: Sequence[str] = ()) -> Path:
    """RESULTS.md beside the folder `out`, from what is saved in `raw`."""
    described = raw / "machine.txt"
    machine = json.loads(described.read_text()) if described.exists() else {}
    path = out.parent / "RESULTS.md"
    path.write_text(render(load(raw), machine, out.name, failed))
    return path


def render(
    results: Sequence[Result], machine: dict[str, str], folder: str = "results", failed: Sequence[str] = ()
) -> str:
    parts = ["# Benchmarks", "Written by `make bench`."]
    parts.append("\n".join(f"- {name}: {value}" for name, value in machine.items()))
    parts.append(f"![ratios of all contenders]({folder}/speed.png)")
    parts.append("## Goals\n\n" + table(judge(results)))
    for group, (title, text) in SECTIONS.items():
        members = sorted((result for result in results if result.group == group), key=_order)
        if members:
            parts.append("\n\n".join(filter(None, [f"## {title}", text])))
            parts += [one(result, stamp(machine)) for result in members]
    parts.append(_READING)
    parts.append(_NOT_MEASURED + "".join(f"\n- {key}: it failed in this run" for key in failed))
    return "\n\n".join(parts) + "\n"


def _order(result: Result) -> tuple[str, int, float]:
    return result.work, ["fp32", "bf16", "fp16", "none"].index(result.precision), result.clip


def one(result: Result, now: str = "") -> str:
    """The table of one result; `now`: what the head of the report says of the last run, which need not be its own."""
    if result.group == "import":
        table = _import_table(result)
    elif result.group == "checkpoints":
        table = checkpoint_table(result)
    elif result.group == "construction":
        table = _construction_table(result)
    else:
        table = _step_table(result)
    notes = [*result.notes, *(f"{row.name}: {row.note.removesuffix('.')}." for row in result.rows if row.note)]
    earlier = f"Measured by an earlier run: {result.measured}." if result.measured not in ("", now) else ""
    return "\n\n".join([f"### {heading(result)}", *filter(None, [_orientation(result), earlier]), table, *notes])


def heading(result: Result) -> str:
    if result.precision == "none":
        return result.title
    return f"{result.title}; {result.precision}" + (f", clipped at {result.clip:g}" if result.clip else "")


def _orientation(result: Result) -> str:
    first = result.rows[0]
    if result.precision == "none" or not first.wall:
        return ""
    milliseconds = 1000 * statistics.median(first.wall)
    return f"First row: {milliseconds:.3g} ms a step. {len(first.wall)} rounds of {result.steps} step(s) each."


def _step_table(result: Result) -> str:
    several = result.ranks > 1
    columns = ["", "time, ratio", "processor time", "time over fused=True", "Python calls", "operators", "host reads"]
    columns += ["bytes reduced", "bytes sent"] if several else []
    memory = any("bytes kept" in row.counts for row in result.rows)
    columns += ["bytes a parameter: kept", "peak"] if memory else []
    lines = [_line(columns), "|---" * len(columns) + "|"]
    for row in result.rows:
        if row.missing:
            lines.append(_line([row.name, f"not measured: {row.missing}", *[""] * (len(columns) - 2)]))
            continue
        ratio, cpu, fused = (
            result.ratios(row.name),
            result.ratios(row.name, clock="cpu"),
            result.ratios(row.name, FUSED),
        )
        cells = [row.name, str(ratio), f"{cpu.median:.3f}" if cpu else "", f"{fused.median:.3f}" if fused else ""]
        cells += [_count(row, "Python calls"), _count(row, "aten ops"), _reads(row)]
        cells += [_count(row, "bytes reduced"), _count(row, "bytes sent")] if several else []
        cells += [f"{row.counts.get(name, 0):.1f}" for name in ("bytes kept", "bytes at peak")] if memory else []
        lines.append(_line(cells))
    return "\n".join(lines)


def checkpoint_table(result: Result) -> str:
    """Rows over `torch.save`, and from `torch.load` on over that."""
    lines = ["| | seconds | ratio |", "|---|---|---|"]
    base = ""
    for row in result.rows:
        base = row.name if row.name in ("torch.save", "torch.load") else base
        lines.append(_line([row.name, f"{statistics.median(row.wall):.3f}", str(result.ratios(row.name, base))]))
    return "\n".join(lines)


def _import_table(result: Result) -> str:
    lines = ["| | ratio | processor time | new modules |", "|---|---|---|---|"]
    for row in result.rows:
        if row.missing:
            lines.append(_line([row.name, f"not measured: {row.missing}", "", ""]))
            continue
        # Rows hold the ratio itself: both imports are of one process.
        wall, cpu = Quartiles.of(row.wall), Quartiles.of(row.cpu)
        lines.append(_line([row.name, str(wall), f"{cpu.median:.3f}", _count(row, "new modules")]))
    return "\n".join(lines)


def _construction_table(result: Result) -> str:
    lines = ["| | seconds | seconds of the processor |", "|---|---|---|"]
    for row in result.rows:
        lines.append(
            _line([row.name, *(f"{row.counts[name]:.2f}" for name in ("seconds", "seconds of the processor"))])
        )
    return "\n".join(lines)


def _reads(row: Row) -> str:
    counters = row.counts.get("step counter reads", 0)
    most = row.counts.get("most host reads", 0)
    at_times = f", at times {most:g}" if most > row.counts["host reads"] else ""
    return _count(row, "host reads") + (f" + {counters:g}" if counters else "") + at_times


def _count(row: Row, name: str) -> str:
    return f"{row.counts[name]:,.0f}" if name in row.counts else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
