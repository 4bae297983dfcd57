"""Which modules each rank of a pipeline has, by the partition that a run would use."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..config import Config
from ..division_plans import make_plans
from . import subject
from .tracker import Tracker, dry_run_mode


def find_holdings(config: Config, reference: str, batch: tuple[str, ...] = ()) -> list[list[str]]:
    """For each rank of the pipeline the blocks, and other modules by their first name, whose parameters it has.

    Raises:
        InputError, IncompatibleConfigError: the model cannot be built, or not be cut so.
    """
    with dry_run_mode(), Tracker():
        model = subject.make(reference, batch).model
        size = config.parallel.pipeline.size
        if size == 1:
            return [_modules(all_names(model))]
        ranks = size * config.parallel.tensor.size
        partition = make_plans(model, torch.optim.AdamW(model.parameters()), None, None, config, ranks).partition
        assert partition is not None
        stages = {name: partition.stages_of(name) for name in all_names(model)}
        return [
            _modules([name for name, users in stages.items() if any(stage % size == rank for stage in users)])
            for rank in range(size)
        ]


def all_names(model: nn.Module) -> list[str]:
    """All names of the parameters."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _modules(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(block_of, names)))


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
