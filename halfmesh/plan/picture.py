"""The picture of a dry-run mesh, as a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from .. import mesh_picture
from ..errors import readable
from .dry_run import DryRun, needed
from .holdings import find_holdings

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
    sizes = mesh_picture.mesh_sizes(config, run.layout.data * math.prod(config.parallel.sizes.values()))
    holdings = find_holdings(config, model, batch)
    needs = {run.stage_of(rank): readable(needed(figures)) for rank, figures in run.ranks.items()}

    def describe(rank: int) -> list[str]:
        stage = run.stage_of(rank)
        blocks = ", ".join(mesh_picture.compress(holdings[stage]))
        return [blocks, mesh_picture.describe_shards(config.parallel, sizes, rank), needs.get(stage, "")]

    path.write_text(mesh_picture.draw(sizes, describe, node), encoding="utf-8")
