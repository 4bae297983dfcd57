"""The picture of a dry-run mesh, as a file: which modules each rank holds, and the bytes that it needs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..engine.parallel_plans import make_plans
from ..errors import readable
from ..report import mesh_picture
from .dry_run import DryRun, needed
from .model_spec import build_model
from .tracker import Tracker, dry_run_mode

if TYPE_CHECKING:
    from ..config import Config


def draw(
    path: Path, config: Config, run: DryRun, model: str, batch: tuple[str, ...] = (), node: int | None = None
) -> None:
    """Draw the mesh of `config` into `path`.

    Args:
        run: a dry run of this config, with the bytes of one rank for some stages.
        node: devices per node, if known.
    """
    held = _held_modules(config, model, batch)
    needs = {run.stage_of(rank): readable(needed(figures)) for rank, figures in run.ranks.items()}

    def describe(rank: int) -> list[str]:
        stage = run.stage_of(rank)
        blocks = ", ".join(mesh_picture.compress(held[stage]))
        return [blocks, mesh_picture.describe_shards(config.parallel, run.sizes, rank), needs.get(stage, "")]

    path.write_text(mesh_picture.draw(run.sizes, describe, node), encoding="utf-8")


def _held_modules(config: Config, reference: str, batch: tuple[str, ...]) -> list[list[str]]:
    """For each stage, the blocks (and other modules, by their first name) whose parameters it holds, by the partition
    that a run would use."""
    with dry_run_mode(), Tracker():
        model = build_model(reference, batch).model
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        stages = config.parallel.pipeline.size
        if stages == 1:
            return [_modules(names)]
        ranks = stages * config.parallel.tensor.size
        partition = make_plans(model, torch.optim.AdamW(model.parameters()), None, None, config, ranks).partition
        assert partition is not None
        ranks_of = {name: partition.ranks_of(name) for name in names}
        return [_modules(name for name in names if rank in ranks_of[name]) for rank in range(stages)]


def _modules(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(mesh_picture.block_of, names)))
