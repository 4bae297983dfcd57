"""`halfmesh verify` alone: the composition table, proven on the devices of this machine."""

from __future__ import annotations

import itertools
import os
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from .. import __version__
from ..amp.float8 import has_float8
from ..compat import Row, check, composition_table, get_rows
from ..config import Config
from ..config.load import load_config
from ..distributed.local_ranks import LocalRanks
from ..parallel.registries import AXES, DATA_STRATEGIES, SCHEDULES
from . import models
from .phases import Options, Work, prove
from .report import Phase, VerifyReport
from .run import Given

CPU_RANKS = 8
EXTRAS = ("", "accumulation", "sequence", "recompute", "offload")


@dataclass(frozen=True)
class Cell:
    """A mode in a layout with 2 ranks on each of `axes`. `extra`: what else it has, one of `EXTRAS`."""

    row: Row
    axes: tuple[str, ...]
    data: int
    strategy: str
    schedule: str = ""
    chunks: int = 1
    extra: str = ""

    @property
    def columns(self) -> list[str]:
        """Those of the composition table."""
        return [*self.axes, *([self.strategy] if self.data > 1 else [])]

    @property
    def world_size(self) -> int:
        return self.data * _ranks(self.axes)

    @property
    def build(self) -> Callable[[], Any]:
        return models.mixture if "expert" in self.axes else models.transformer

    @property
    def config(self) -> Config:
        points = ["blocks.1", "blocks.2", "blocks.3"] if self.chunks > 1 else ["blocks.2"]
        pipeline = {"microbatches": 4, "schedule": self.schedule or "1f1b", "chunks": self.chunks, "partition": points}
        tensor: dict[str, Any] = {"plan": models.PLANS[self.build]}
        if self.extra == "sequence":
            tensor = {"plan": tensor["plan"] | models.SEQUENCE, "sequence_parallel": True}
        known = {"tensor": tensor, "pipeline": pipeline}
        parallel: dict[str, Any] = {name: {"size": 2, **known.get(name, {})} for name in self.axes}
        parallel["data"] = {"size": self.data, "strategy": self.strategy, "cpu_offload": self.extra == "offload"}
        given: dict[str, Any] = {"clip_grad_norm": 0.5, "parallel": parallel}
        given |= {self.row.key: {"mode": self.row.mode}} if self.row.key else {}
        given |= {"gradient_accumulation": 2} if self.extra == "accumulation" else {}
        given |= {"activation_checkpoint": {"patterns": ["*mlp"]}} if self.extra == "recompute" else {}
        return load_config(given)

    def is_allowed(self, device: str) -> bool:
        """Return True if nothing is known against it."""
        means_nothing = (self.extra == "sequence" and ("tensor" not in self.axes or "expert" in self.axes)) or (
            self.extra == "offload" and self.strategy != "fsdp"
        )
        return not means_nothing and not check(self.config, self.world_size, device)

    def __str__(self) -> str:
        words = [f"{axis} 2" + (f" ({self.schedule})" if axis == "pipeline" else "") for axis in self.axes]
        words += [f"{self.strategy} {self.data}"] if self.data > 1 else []
        return " x ".join(words or ["one rank"]) + (f", {self.extra}" if self.extra else "")


def find_cells(device: str, ranks: int, float8: bool, quick: bool = False) -> Iterator[Cell]:
    """Few cells in which each row of the composition table, each column, and each pair of them occurs that is allowed
    and can run on `ranks` ranks (on a CPU: on at most that many); quick: each row and each column."""
    allowed = [
        cell for cell in _all_cells(device, ranks) if (float8 or cell.row.key != "fp8") and cell.is_allowed(device)
    ]

    def holds(cell: Cell) -> set[Any]:
        words = [str(cell.row), *cell.columns]
        trio = {"trio"} if {"tensor", "pipeline", "fsdp"} <= {*words} else set()
        return set(words) if quick else {*words, *itertools.combinations(words, 2), *trio}

    chosen, missing = list[Cell](), set().union(*map(holds, allowed))
    while missing:
        chosen.append(max(allowed, key=lambda cell: len(holds(cell) & missing) / (1 + cell.world_size)))
        missing -= holds(chosen[-1])
    used = Counter[str]()
    for cell in sorted(chosen, key=lambda cell: cell.world_size):  # schedules and extras are dealt out in turn
        schedules = [*itertools.product(SCHEDULES.names(), (1, 2))] if "pipeline" in cell.axes else [("", 1)]
        forms = [
            form
            for (schedule, chunks), extra in itertools.product(schedules, EXTRAS)
            if (form := replace(cell, schedule=schedule, chunks=chunks, extra=extra)).is_allowed(device)
        ]
        dealt = min(forms, key=lambda form: used[form.schedule] + used[form.extra or "none"])
        used.update(filter(None, [dealt.schedule, dealt.extra or "none"]))
        yield dealt


def _ranks(axes: Collection[str]) -> int:
    """The ranks that compute the batch of one data rank, with 2 on each of `axes`."""
    return 2 ** sum(not AXES.get(name).replica_dim for name in axes)


def _all_cells(device: str, ranks: int) -> Iterator[Cell]:
    axes = [some for n in range(4) for some in itertools.combinations(AXES.names(), n)]
    for row, some in itertools.product(get_rows(), axes):
        for data in (1, 2) if device == "cpu" else [ranks // _ranks(some)]:
            for strategy in DATA_STRATEGIES.names() if data > 1 else ["replicate"]:
                cell = Cell(row, some, data, strategy)
                if cell.world_size == ranks or (device == "cpu" and 1 < cell.world_size < ranks):
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
            table[str(cell.row)] |= dict.fromkeys(cell.columns, _result(report))
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
        total = sum(seconds for *_, seconds in self.results)
        rows = [
            [cell.row, cell, report.world_size, _result(report), *map(_share, report.phases), f"{seconds:.1f}"]
            for cell, report, seconds in self.results
        ]
        parts = [
            f"halfmesh verify: {len(self.results) - len(wrong)} of {len(self.results)} cells equal, in {total:.0f} s",
            "\n".join(f"- {name}: {text}" for name, text in self.about.items()),
            _markdown(["", *table["none"]], [[row, *cells.values()] for row, cells in table.items()]),
            _markdown(["mode", "layout", "ranks", "", "structure", "format", "s"], rows),
            "structure, format: the largest difference from one process / the allowed one, in float64 and in the mode.",
        ]
        return "\n\n".join(parts + [f"{cell.row}, {cell}:\n\n{report}" for cell, report in wrong])


def _result(report: VerifyReport) -> str:
    return "equal" if report.equal else "FAILED"


def _share(phase: Phase) -> str:
    return f"{max(phase.largest.values(), default=0.0):.1g}"


def _markdown(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (columns, ["---"] * len(columns), *rows))


@dataclass(frozen=True)
class _Work(Work):
    """On processes that serve all cells, since no model here leaves anything behind: half the time of new ones. Those
    that are `waiting`, by world size, end with the `stack`."""

    stack: ExitStack
    waiting: dict[int, list[LocalRanks]]

    @contextmanager
    def _ranks(self, world_size: int) -> Iterator[LocalRanks]:
        waiting = self.waiting[world_size]
        ranks = waiting.pop() if waiting else self.stack.enter_context(super()._ranks(world_size))
        yield ranks
        waiting.append(ranks)


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
    if not float8:
        about["fp8"] = "not run: it needs torchao" + (" and a GPU with float8" if gpus else "")
    if ranks == 1:
        about["layouts"] = "not run: they need two GPUs. To run them on the CPU: halfmesh verify --device cpu"
    results, cells = [], list(find_cells(device, ranks, float8, quick))
    with ExitStack() as stack:
        work = partial(_Work, stack=stack, waiting=defaultdict(list))
        for cell in track(cells, "verifying", console=Console(stderr=True), disable=not sys.stderr.isatty()):
            began, options = time.monotonic(), Options(cell.world_size, shrink=False, device=device)
            report = prove(cell.config, options, Given(cell.build), work)
            results.append((cell, report, time.monotonic() - began))
    return MachineReport(about, results)
