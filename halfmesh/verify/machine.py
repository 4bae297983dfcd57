"""`halfmesh verify` alone: the composition table, proven on the devices of this machine."""

from __future__ import annotations

import itertools
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from .. import __version__
from ..amp.float8 import has_float8
from ..compat import Row, check, get_rows
from ..config import Config
from ..config.load import load_config
from ..parallel.registries import AXES, DATA_STRATEGIES, SCHEDULES
from . import models
from .phases import verify
from .report import VerifyReport

CPU_RANKS = 8


@dataclass(frozen=True)
class Cell:
    """A mode in a layout with 2 ranks on each of `axes`."""

    row: Row
    axes: tuple[str, ...]
    data: int
    strategy: str
    schedule: str = "1f1b"

    @property
    def words(self) -> tuple[str, ...]:
        """The row and the columns of the composition table."""
        return (str(self.row), *self.axes, *([self.strategy] if self.data > 1 else []))

    @property
    def world_size(self) -> int:
        return self.data * 2 ** sum(not AXES.get(name).replica_dim for name in self.axes)

    @property
    def has_experts(self) -> bool:
        return "expert" in self.axes

    @property
    def config(self) -> Config:
        chunks = 2 if SCHEDULES.get(self.schedule).interleaves else 1
        points = ["blocks.1", "blocks.2", "blocks.3"] if chunks > 1 else ["blocks.2"]
        pipeline = {"microbatches": 4, "schedule": self.schedule, "chunks": chunks, "partition": points}
        known: dict[str, Any] = {
            "tensor": {"plan": models.PLAN | ({} if self.has_experts else models.MLP)},
            "pipeline": pipeline,
        }
        parallel: dict[str, Any] = {name: {"size": 2, **known.get(name, {})} for name in self.axes}
        parallel["data"] = {"size": self.data, "strategy": self.strategy}
        mode = {self.row.key: {"mode": self.row.mode}} if self.row.key else {}
        return load_config({"clip_grad_norm": 0.5, "parallel": parallel, **mode})

    def is_allowed(self, device: str) -> bool:
        """Return True if nothing is known against it."""
        return not check(self.config, self.world_size, device)

    def __str__(self) -> str:
        words = [f"{axis} 2" + (f" ({self.schedule})" if axis == "pipeline" else "") for axis in self.axes]
        words += [f"{self.strategy} {self.data}"] if self.data > 1 else []
        return " x ".join(words or ["one rank"])


def find_cells(device: str, ranks: int, float8: bool, quick: bool = False) -> Iterator[Cell]:
    """Few cells in which each row of the composition table, each column, and each pair of them occurs that is allowed
    and can run on `ranks` ranks (on a CPU: on at most that many); quick: each row and each column."""
    rows = [row for row in get_rows() if float8 or row.key != "fp8"]
    axes = [some for n in range(4) for some in itertools.combinations(AXES.names(), n)]
    sizes, worlds = ((1, 2), range(2, ranks + 1)) if device == "cpu" else (range(1, ranks + 1), [ranks])
    forms = itertools.product(rows, axes, sizes, DATA_STRATEGIES.names())
    cells = [Cell(*form) for form in forms if form[2] > 1 or form[3] == "replicate"]
    allowed = [cell for cell in cells if cell.world_size in worlds and cell.is_allowed(device)]

    def holds(cell: Cell) -> set[Any]:
        return {*cell.words, *(() if quick else itertools.combinations(cell.words, 2))}

    missing, used = set().union(*map(holds, allowed)), Counter[str]()
    while missing:
        cell = max(allowed, key=lambda cell: len(holds(cell) & missing) / (1 + cell.world_size))
        missing -= holds(cell)
        if "pipeline" in cell.axes:  # schedules are dealt out in turn
            dealt = (replace(cell, schedule=schedule) for schedule in SCHEDULES.names())
            cell = min((one for one in dealt if one.is_allowed(device)), key=lambda one: used[one.schedule])
            used[cell.schedule] += 1
        yield cell


@dataclass(frozen=True)
class MachineReport:
    """The result: versions and devices, and each cell with its seconds."""

    about: dict[str, str]
    results: list[tuple[Cell, VerifyReport, float]]

    @property
    def equal(self) -> bool:
        return all(report.equal for _, report, _ in self.results)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        cells = [
            {"mode": str(cell.row), "layout": str(cell), "seconds": round(seconds, 2), **report.to_dict()}
            for cell, report, seconds in self.results
        ]
        return {"equal": self.equal, "machine": self.about, "cells": cells}

    def __str__(self) -> str:
        """Markdown, for an issue."""
        wrong = [(cell, report) for cell, report, _ in self.results if not report.equal]
        counts, total = (len(self.results) - len(wrong), len(self.results)), sum(s for *_, s in self.results)
        lines = ["halfmesh verify: {} of {} cells equal, in {:.0f} s".format(*counts, total), ""]
        lines += [f"- {name}: {text}" for name, text in self.about.items()]
        lines += ["", "| mode | layout | ranks | | structure | format | s |", "|---" * 7 + "|"]
        for cell, report, seconds in self.results:
            shares = " | ".join(f"{max(phase.largest.values(), default=0.0):.1g}" for phase in report.phases)
            result = "equal" if report.equal else "FAILED"
            lines.append(f"| {cell.row} | {cell} | {report.world_size} | {result} | {shares} | {seconds:.1f} |")
        lines += ["", "structure, format: the largest difference from one process / the allowed one."]
        return "\n".join(lines + [f"\n{cell.row}, {cell}:\n\n{report}" for cell, report in wrong])


def verify_machine(device: str | None = None, quick: bool = False) -> MachineReport:
    """Verify a few cells of the composition table that represent all that this machine can run, with a progress bar.

    Args:
        device: "cuda": a rank on each of an even number of GPUs, or on the only one; "cpu": up to 8 ranks; None: GPUs,
            if there are any.
        quick: each row and each column of the table once, not each pair.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    ranks = max(1, gpus - gpus % 2) if gpus else CPU_RANKS
    float8 = find_spec("torchao") is not None and (not gpus or has_float8(torch.device("cuda", 0)))
    devices = f"{ranks} of {gpus} x {torch.cuda.get_device_name(0)}, NCCL" if gpus else f"{os.cpu_count()} cores, gloo"
    about = {
        "devices": devices,
        "versions": f"halfmesh {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "system": platform.platform(),
    }
    if not float8 or ranks == 1:
        about["not run"] = "fp8 needs torchao, and float8 on a GPU; layouts need two GPUs, or --device cpu"
    results, cells = [], sorted(find_cells(device, ranks, float8, quick), key=lambda cell: cell.world_size)
    for cell in track(cells, "verifying", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        began = time.monotonic()
        build = models.mixture if cell.has_experts else models.transformer
        report = verify(cell.config, build, world_size=cell.world_size, shrink=False, device=device)
        results.append((cell, report, time.monotonic() - began))
    return MachineReport(about, results)
