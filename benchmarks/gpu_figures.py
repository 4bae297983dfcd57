"""What is computed about a GPU's work rather than measured: operations, bytes, peaks; and the page that shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Dense peaks in FLOP/s: (fp32 without TF32, fp16 and bf16 with fp32 sums). From NVIDIA's data sheets of each; where a
# sheet gives the number with sparsity, half of it. The first pattern that fits torch's name of the device counts.
PEAKS: list[tuple[str, float, float]] = [
    (r"B200", 75e12, 2250e12),
    (r"H200", 67e12, 989e12),
    (r"H100 PCIe", 51e12, 756e12),
    (r"H100 NVL", 60e12, 835e12),
    (r"H100", 67e12, 989e12),
    (r"A100", 19.5e12, 312e12),
    (r"\bA10\b", 31.2e12, 125e12),
    (r"\bL40S\b", 91.6e12, 362e12),
    (r"\bL4\b", 30.3e12, 121e12),
    (r"\bV100", 15.7e12, 125e12),
    (r"\bT4\b", 8.1e12, 65e12),
]
NOT_MEASURED = "not measured"
SYNC_EVENTS = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""What torch.profiler shows where the host waits for the device: the first for a number that is read. (Not so a copy
that nobody waits for, or a read of torch's step counters, which are on the host.)"""
_LAUNCH = "cudaLaunchKernel"


def waits(events: Mapping[str, int], steps: int) -> dict[str, float]:
    """How often each of `SYNC_EVENTS` is in a step, of the profiler's counts by name; empty if it saw no kernel
    launched, because then it sees nothing of the device."""
    if not any(name.startswith(_LAUNCH) for name in events):
        return {}
    return {name: events.get(name, 0) / steps for name in SYNC_EVENTS}


def peak_flops(device_name: str, half: bool) -> float | None:
    """The device's peak, if it is in the table."""
    for pattern, single, halved in PEAKS:
        if re.search(pattern, device_name):
            return halved if half else single
    return None


@dataclass(frozen=True)
class Shape:
    """What a step multiplies.

    Attributes:
        weights: (numbers in weight matrices, rows of the batch that each is multiplied with).
        layers, width, length, batch: of the attention.
    """

    weights: tuple[tuple[int, int], ...]
    layers: int
    width: int
    length: int
    batch: int

    @property
    def step_flops(self) -> float:
        """6 for each weight and row it is multiplied with (a product and a sum, forward once and backward twice), and
        12 x layers x width x length for each token of attention: as in appendix B of PaLM (arXiv:2204.02311), without
        what causality could leave out, and without anything that is computed again."""
        products = sum(numbers * rows for numbers, rows in self.weights)
        attention = self.layers * self.width * self.length * (self.batch * self.length)
        return 6.0 * products + 12.0 * attention


def mfu(shape: Shape, seconds: float, device_name: str, half: bool) -> float | None:
    """Model FLOPs utilization: the step's FLOPs over what the device could do in that time."""
    peak = peak_flops(device_name, half)
    return None if peak is None else shape.step_flops / (seconds * peak)


def update_bytes(parameters: int, masters: bool, clip: bool = True) -> float:
    """Bytes that AdamW's update has to move at least, with each number read and written once.

    fp32: read weight, gradient and two moments, write weight and moments. With masters: a half-precision gradient is
    read, masters and moments are read and written, the half-precision weight is written. The norm reads each gradient
    once more: nothing can be updated before the norm is known.
    """
    gradient = 2 if masters else 4
    state = 3 * 4 * 2  # weight or master, and two moments, in fp32: read and written
    return float(parameters * (gradient * (2 if clip else 1) + state + (2 if masters else 0)))


@dataclass
class GpuRow:
    """One contender of one case. What is None was not measured."""

    model: str
    mode: str
    compiled: bool
    name: str
    ratio: str = ""
    over_fused: str = ""
    seconds: float | None = None
    tail: float | None = None
    parameters: int = 0
    tail_bound: float | None = None
    syncs: dict[str, float] = field(default_factory=dict)
    bytes_per_parameter: float | None = None
    mfu: float | None = None
    missing: str = ""


COLUMNS = ["mode", "compile", "", "time, ratio", "over fused=True", "ms a step", "update over its bound"]
COLUMNS += ["waits a step", "peak bytes a parameter", "MFU"]
_READING = """## How to read it

- A ratio is the time of a step over that of the hand-written loop (autocast, GradScaler in fp16, AdamW with default
  flags, clipping at 1.0) in the same round, all in one process; median, and quartiles. NAIVE and APEX stand beside the
  autocast loop of the same dtype. With compile, the hand-written loops are compiled, too.
- *update over its bound*: the time from gradients to new weights, over the bytes that this has to move at least
  (`gpu_figures.update_bytes`) divided by the bandwidth of a copy that was measured on the same device. 1 is the best.
- *waits a step*: {events},
  as torch.profiler counts them.
- *peak bytes a parameter*: torch.cuda.max_memory_allocated within a step, less what was there before the model was.
- *MFU*: 6 FLOPs for each weight and token, and 12 x layers x width x length for each token's attention, over the
  device's dense peak by NVIDIA's data sheet (`gpu_figures.PEAKS`; fp32 without TF32). No peak is known: `-`."""


def render(rows: Sequence[GpuRow], heading: Sequence[str]) -> str:
    """The page: a table for each model."""
    parts = ["# One GPU", "Written by `make bench-gpu`.", "\n".join(f"- {line}" for line in heading)]
    for model in dict.fromkeys(row.model for row in rows):
        lines = [_line(COLUMNS), "|---" * len(COLUMNS) + "|"]
        lines += [_line(_cells(row)) for row in rows if row.model == model]
        parts.append(f"## {model}\n\n" + "\n".join(lines))
    parts.append(_READING.format(events=", ".join(SYNC_EVENTS)))
    return "\n\n".join(parts) + "\n"


def _cells(row: GpuRow) -> list[str]:
    begin = [row.mode, "yes" if row.compiled else "no", row.name]
    if row.missing:
        said = row.missing if row.missing == NOT_MEASURED else f"{NOT_MEASURED}: {row.missing}"
        return begin + [said] + [""] * (len(COLUMNS) - 4)
    over_bound = row.tail / row.tail_bound if row.tail and row.tail_bound else None
    syncs = ", ".join(f"{row.syncs[name]:g}" for name in SYNC_EVENTS) if row.syncs else "-"
    return [
        *begin,
        row.ratio,
        row.over_fused,
        _number(row.seconds, 1000.0),
        _number(over_bound),
        syncs,
        _number(row.bytes_per_parameter),
        "-" if row.mfu is None else f"{row.mfu:.1%}",
    ]


def _number(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.3g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
