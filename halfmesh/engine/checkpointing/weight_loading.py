"""engine.load_weights: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from ...errors import InputError, bullet_list
from ...parallel.context import ParallelContext
from .contents import Holding, Pieces
from .loading import model_problems, tell
from .together import together
from .weight_files import Slicer, find_files, open_file


def load_weights(holding: Holding, context: ParallelContext, path: Path) -> None:
    """`Engine.load_weights`."""
    what = f"loading weights from {path} failed"
    targets, first = holding.weight_targets(), holding.division.first_names(holding.model)
    with ExitStack() as opened:

        def look() -> dict[str, tuple[tuple[int, ...], Slicer]]:
            found: dict[str, tuple[tuple[int, ...], Slicer]] = {}
            for file in find_files(path):
                found |= opened.enter_context(open_file(file))
            return found

        stored = together(context, what, look)
        shapes = {name: piece.placement.shape for name, piece in targets.items()}
        everyone = {name: shape for theirs in context.everyone(shapes) for name, shape in theirs.items()}
        by_first = {first.get(name, name): name for name in stored}
        saved = {name: stored[known][0] for name, known in by_first.items()}
        problems = list(model_problems(everyone, saved, "the file"))
        if problems:
            raise InputError(bullet_list(f"{path} does not fit the model of this engine:", problems))
        what += " when weights were changed already; make the engine anew"
        together(context, what, lambda: _read(targets, {name: stored[known][1] for name, known in by_first.items()}))
    tell(holding)


@torch.no_grad()
def _read(targets: Pieces, stored: Mapping[str, Slicer]) -> None:
    for name, piece in targets.items():
        for region in piece.placement.regions:
            box = tuple(slice(at, at + size) for at, size in zip(region.at, region.sizes, strict=True))
            region.view(piece.held).copy_(stored[name](box))
