"""Which modules each rank of a pipeline holds, by the partition that a run would use."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..config import Config
from ..division_plans import make_plans
from ..mesh_picture import block_of
from .model_spec import build_model
from .tracker import Tracker, dry_run_mode


def find_holdings(config: Config, reference: str, batch: tuple[str, ...] = ()) -> list[list[str]]:
    """For each rank of the pipeline, the blocks (and other modules, by their first name) whose parameters it holds.

    Raises:
        InputError, IncompatibleConfigError: the model cannot be built or split.
    """
    with dry_run_mode(), Tracker():
        model = build_model(reference, batch).model
        size = config.parallel.pipeline.size
        if size == 1:
            return [_modules(all_names(model))]
        ranks = size * config.parallel.tensor.size
        partition = make_plans(model, torch.optim.AdamW(model.parameters()), None, None, config, ranks).partition
        assert partition is not None
        ranks_of = {name: partition.ranks_of(name) for name in all_names(model)}
        return [_modules([name for name, holders in ranks_of.items() if rank in holders]) for rank in range(size)]


def all_names(model: nn.Module) -> list[str]:
    """The names of all parameters, with repeated ones."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _modules(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(block_of, names)))
