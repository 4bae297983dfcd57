"""Which modules each rank of a pipeline has, by the partition that a run would use."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..config import Config
from ..division_plans import make_plans
from ..parallel.pipeline.partition import all_entries
from .model_spec import build_model
from .tracker import Tracker, dry_run_mode


def find_holdings(config: Config, reference: str, batch: tuple[str, ...] = ()) -> list[list[str]]:
    """For each rank of the pipeline the blocks, and other modules by their first name, whose parameters it has.

    Raises:
        InputError, IncompatibleConfigError: the model cannot be built, or not be cut so.
    """
    with dry_run_mode(), Tracker():
        model = build_model(reference, batch).model
        size = config.parallel.pipeline.size
        if size == 1:
            return [_modules(model, all_names(model))]
        ranks = size * config.parallel.tensor.size
        partition = make_plans(model, torch.optim.AdamW(model.parameters()), None, None, config, ranks).partition
        assert partition is not None
        entries = partition.entries(model)
        return [
            _modules(model, [e for e in all_names(model) if any(stage % size == rank for stage in entries[e])])
            for rank in range(size)
        ]


def all_names(model: nn.Module) -> list[tuple[str, str]]:
    """Where the parameters are: a module's name, and their own there."""
    return [entry for entry, value in all_entries(model) if isinstance(value, nn.Parameter)]


def _modules(model: nn.Module, entries: Iterable[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(block_of(".".join(filter(None, entry))) for entry in entries))


def block_of(name: str) -> str:
    """The block that a parameter is in ("blocks.3"), or the first part of its name."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]


def compress(names: Iterable[str]) -> list[str]:
    """blocks.0, blocks.1, blocks.2 as blocks.0-2."""
    found: list[tuple[str, list[int]]] = []
    for name in names:
        row, _, last = name.rpartition(".")
        if not last.isdigit():
            found.append((name, []))
        elif found and found[-1][0] == row and found[-1][1] and int(last) == found[-1][1][-1] + 1:
            found[-1][1].append(int(last))
        else:
            found.append((row, [int(last)]))
    return [_range(row, numbers) for row, numbers in found]


def _range(row: str, numbers: list[int]) -> str:
    if not numbers:
        return row
    span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    return f"{row}.{span}" if row else span
