"""What halfmesh costs before the first step: its import, and making an engine."""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

import halfmesh

from .contenders import adamw
from .harness import HALFMESH, HALFMESH_USED, Result, Row, rotated
from .works import make_transformer

NOTHING = "torch alone"
IMPORTS = {
    NOTHING: "pass",
    HALFMESH: "import halfmesh",
    HALFMESH_USED: "from halfmesh import initialize",
    "accelerate": "import accelerate",
    "Lightning Fabric": "import lightning_fabric",
    "DeepSpeed": "import deepspeed",
}
# Both in one fresh process, so that a busy machine slows down what is divided and what it is divided by.
_PROBE = """
import sys, time
begin, cpu = time.perf_counter(), time.process_time()
import torch
middle, cpu_middle, known = time.perf_counter(), time.process_time(), len(sys.modules)
{statement}
end, cpu_end = time.perf_counter(), time.process_time()
print("PROBE", (end - begin) / (middle - begin), (cpu_end - cpu) / (cpu_middle - cpu), len(sys.modules) - known)
"""


def measure_imports(rounds: int) -> Result:
    """`import torch` and another import after it, over `import torch`, in fresh processes that take turns."""
    names = list(IMPORTS)
    rows = [Row(name) for name in names]
    for number in range(rounds):
        for place in rotated(len(names), number):
            row = rows[place]
            if row.missing:
                continue
            found = _probe(IMPORTS[names[place]])
            if isinstance(found, str):
                row.missing = found
                continue
            row.wall.append(found[0])
            row.cpu.append(found[1])
            row.counts["new modules"] = found[2]
    notes = [
        "A number is (torch and then this) over (torch alone) of the same fresh process. halfmesh imports its parts "
        "when they are first used: the row with initialize is what a program pays."
    ]
    return Result("import", "import, after torch", "none", rows, group="import", notes=notes)


def _probe(statement: str) -> tuple[float, float, float] | str:
    """Ratios and new modules, or why there are none."""
    done = subprocess.run([sys.executable, "-c", _PROBE.format(statement=statement)], capture_output=True, text=True)
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("PROBE")]
    if not said:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    wall, cpu, modules = map(float, said[0][1:])
    return wall, cpu, modules


def measure_construction(rounds: int, quick: bool = False) -> Result:
    """Seconds of `halfmesh.initialize` alone: model and optimizer are there before it begins."""
    torch.set_num_threads(1)
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    configs: dict[str, dict[str, Any]] = {
        "fp32": {},
        "TORCH fp16": {"fp16": {"mode": "torch"}},
        "TORCH bf16": {"bf16": {"mode": "torch"}},
        "NAIVE fp16": {"fp16": {"mode": "naive"}},
        "NAIVE bf16": {"bf16": {"mode": "naive"}},
    }
    rows = [Row(name) for name in configs]
    depth, width, vocabulary = (2, 256, 1024) if quick else (12, 768, 10240)
    numbers = 0
    for _ in range(rounds):
        for row in rows:
            with torch.device("meta"):
                model = make_transformer(depth, width, 256, 64, vocabulary)
            model = model.to_empty(device="cpu")  # its values do not matter, and drawing them takes seconds
            for param in model.parameters():
                torch.nn.init.constant_(param, 0.01)
            numbers = sum(param.numel() for param in model.parameters())
            optimizer = adamw(model)
            wall, cpu = time.perf_counter(), time.process_time()
            engine = halfmesh.initialize(model, optimizer, config=configs[row.name], device="cpu")
            row.wall.append(time.perf_counter() - wall)
            row.cpu.append(time.process_time() - cpu)
            engine.close()
    for row in rows:
        row.counts = {"seconds": statistics.median(row.wall), "seconds of the processor": statistics.median(row.cpu)}
    title = f"halfmesh.initialize of a transformer of {numbers / 1e6:.0f} M parameters"
    notes = [
        f"What it takes beyond building model and optimizer; the median of {rounds}. Model: {numbers:,} parameters."
    ]
    return Result("construction", title, "none", rows, group="construction", notes=notes)
