"""`halfmesh verify` alone: the composition table, proven on the devices of this machine."""

from __future__ import annotations

import itertools
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from .. import __version__
from ..amp.float8 import has_float8
from ..compat import Row, check, composition_table, get_rows
from ..config import Config
from ..config.composition import Setup
from ..config.load import load_config
from ..distributed.local_ranks import ENGINE, LocalRanks, RankError
from ..parallel.dims import in_words
from ..parallel.registries import AXES, DATA_STRATEGIES, SCHEDULES
from . import models
from .phases import Options, Work
from .report import VerifyReport
from .subject import Given

CPU_RANKS = 8
EXTRAS = ("plain", "accumulation", "sequence", "recompute", "offload")


@dataclass(frozen=True)
class Cell:
    """A mode in a layout with 2 ranks on each of `axes`. `extra`: what else it has, one of `EXTRAS`."""

    row: Row
    axes: tuple[str, ...]
    data: int
    strategy: str
    schedule: str = ""
    extra: str = "plain"

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
        schedule = self.schedule or "1f1b"
        chunks = 2 if SCHEDULES.get(schedule).interleaves else 1
        points = ["blocks.1", "blocks.2", "blocks.3"] if chunks > 1 else ["blocks.2"]
        pipeline = {"microbatches": 4, "schedule": schedule, "chunks": chunks, "partition": points}
        divides = self.extra == "sequence"
        plan = models.PLAN | ({} if self.has_experts else models.MLP) | (models.SEQUENCE if divides else {})
        known: dict[str, Any] = {"tensor": {"plan": plan, "sequence_parallel": divides}, "pipeline": pipeline}
        parallel: dict[str, Any] = {name: {"size": 2, **known.get(name, {})} for name in self.axes}
        parallel["data"] = {"size": self.data, "strategy": self.strategy, "cpu_offload": self.extra == "offload"}
        given: dict[str, Any] = {"clip_grad_norm": 0.5, "parallel": parallel}
        given |= {self.row.key: {"mode": self.row.mode}} if self.row.key else {}
        given |= {"gradient_accumulation": 2} if self.extra == "accumulation" else {}
        given |= {"activation_checkpoint": {"patterns": ["*mlp"]}} if self.extra == "recompute" else {}
        return load_config(given)

    def is_allowed(self, device: str) -> bool:
        """Return True if its extra means something, and nothing is known against it."""
        divides, offloads = self.extra == "sequence", self.extra == "offload"
        if (divides and ("tensor" not in self.axes or self.has_experts)) or (offloads and self.strategy != "fsdp"):
            return False
        return not check(self.config, self.world_size, device)

    def __str__(self) -> str:
        words = [f"{axis} 2" + (f" ({self.schedule})" if axis == "pipeline" else "") for axis in self.axes]
        words += [f"{self.strategy} {self.data}"] if self.data > 1 else []
        return " x ".join(words or ["one rank"]) + (f", {self.extra}" if self.extra != "plain" else "")


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
        trio = {"trio"} if {"tensor", "pipeline", "fsdp"} <= {*cell.words} else set()
        return {*cell.words, *(() if quick else (*itertools.combinations(cell.words, 2), *trio))}

    chosen, missing, used = list[Cell](), set().union(*map(holds, allowed)), Counter[str]()
    while missing:
        chosen.append(max(allowed, key=lambda cell: len(holds(cell) & missing) / (1 + cell.world_size)))
        missing -= holds(chosen[-1])
    for cell in sorted(chosen, key=lambda cell: cell.world_size):  # schedules and extras are dealt out in turn
        schedules = SCHEDULES.names() if "pipeline" in cell.axes else [""]
        dealt = (replace(cell, schedule=schedule, extra=extra) for schedule in schedules for extra in EXTRAS)
        some = (form for form in dealt if form.is_allowed(device))
        cell = min(some, key=lambda form: used[form.schedule] + used[form.extra])
        used.update([cell.schedule, cell.extra])
        yield cell


@dataclass(frozen=True)
class MachineReport:
    """The result: versions and devices, and each cell with its seconds."""

    about: dict[str, str]
    results: list[tuple[Cell, VerifyReport, float]]

    @property
    def equal(self) -> bool:
        return all(report.equal for _, report, _ in self.results)

    @property
    def table(self) -> dict[str, dict[str, str]]:
        """The composition table: rejected, equal, FAILED, or - for what was not run here."""
        table = {
            row: {column: "-" if cell == "yes" else "rejected" for column, cell in cells.items()}
            for row, cells in composition_table().items()
        }
        for cell, report, _ in sorted(self.results, key=lambda result: not result[1].equal):
            row, *columns = cell.words
            table[row] |= dict.fromkeys(columns, _result(report))
        return table

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        cells = [
            {"mode": str(cell.row), "layout": str(cell), "seconds": round(seconds, 2), **report.to_dict()}
            for cell, report, seconds in self.results
        ]
        return {"equal": self.equal, "machine": self.about, "table": self.table, "cells": cells}

    def __str__(self) -> str:
        """Markdown, for an issue."""
        table, wrong = self.table, [(cell, report) for cell, report, _ in self.results if not report.equal]
        counts, total = (len(self.results) - len(wrong), len(self.results)), sum(s for *_, s in self.results)
        lines = ["halfmesh verify: {} of {} cells equal, in {:.0f} s".format(*counts, total), ""]
        lines += [f"- {name}: {text}" for name, text in self.about.items()]
        rows: list[list[Any]] = [["", *table["none"]], *([row, *cells.values()] for row, cells in table.items())]
        lines += _markdown(rows)
        rows = [["mode", "layout", "ranks", "", "structure", "format", "s"]]
        for cell, report, seconds in self.results:
            shares = [f"{max(phase.largest.values(), default=0.0):.1g}" for phase in report.phases]
            rows.append([cell.row, cell, report.world_size, _result(report), *shares, f"{seconds:.1f}"])
        lines += [*_markdown(rows), "", "structure, format: the largest difference from one process / the allowed one."]
        return "\n".join(lines + [f"\n{cell.row}, {cell}:\n\n{report}" for cell, report in wrong])


def _result(report: VerifyReport) -> str:
    return "equal" if report.equal else "FAILED"


def _markdown(rows: list[list[Any]]) -> list[str]:
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in rows)
    return ["", head, "|---" * len(rows[0]) + "|", *lines]


@dataclass(frozen=True)
class _Work(Work):
    """On `ranks` that serve all cells, since no model here leaves anything behind: half the time of new ones."""

    ranks: Mapping[int, LocalRanks]

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        return self.ranks[world_size].call(function, args, timeout=self.options.timeout, group=world_size > 1)


def _verify(cell: Cell, device: str, ranks: Mapping[int, LocalRanks]) -> VerifyReport:
    setup, options = Setup.of(cell.config, cell.world_size), Options(cell.world_size, device=device)
    work = _Work(Given(models.mixture if cell.has_experts else models.transformer), setup, options, ranks)
    mesh, size = in_words(setup.dims.sizes), cell.world_size
    with tempfile.TemporaryDirectory(prefix="halfmesh_verify_") as folder:
        try:
            phases = tuple(work.phases(Path(folder)))
        except RankError as error:  # the engine rejects the layout
            return VerifyReport(False, None, (), mesh, size, problems=(error.rejection,))
    return VerifyReport(phases[-1].equal, phases[-1].first, phases, mesh, size)


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
    results, cells = [], list(find_cells(device, ranks, float8, quick))
    sizes, preload = {1, *(cell.world_size for cell in cells)}, (*ENGINE, "halfmesh.verify.run")
    with ExitStack() as stack:
        running = {size: stack.enter_context(LocalRanks(size, device, preload)) for size in sizes}
        for cell in track(cells, "verifying", console=Console(stderr=True), disable=not sys.stderr.isatty()):
            began = time.monotonic()
            results.append((cell, _verify(cell, device, running), time.monotonic() - began))
    return MachineReport(about, results)
