"""engine.load_weights: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from ..amp.precision import find_overflow
from ..errors import InputError, bullet_list, shorten
from ..parallel.context import ParallelContext
from ..parallel.regions import Region
from .contents import Holding, Pieces
from .loading import model_problems
from .together import together
from .weight_files import Slicer, Stored, find_files, kind_of, open_file


def load_weights(holding: Holding, context: ParallelContext, path: Path) -> None:
    """`Engine.load_weights`."""
    what = f"loading weights from {path} failed"
    targets, first = holding.weight_targets(), holding.division.first_names(holding.model)
    with ExitStack() as opened:

        def look() -> dict[str, Stored]:
            found: dict[str, Stored] = {}
            for file in find_files(path):
                found |= opened.enter_context(open_file(file))
            return found

        stored = together(context, what, look)
        shapes = {name: (piece.placement.shape, kind_of(piece.held)) for name, piece in targets.items()}
        everyone = {name: known for theirs in context.everyone(shapes) for name, known in theirs.items()}
        by_first = {first.get(name, name): name for name in stored}
        saved = {name: stored[known].shape for name, known in by_first.items()}
        problems = list(model_problems({name: shape for name, (shape, _) in everyone.items()}, saved, "the file"))
        kinds = {name: stored[known].kind for name, known in by_first.items()}
        problems += _other_kinds({name: kind for name, (_, kind) in everyone.items()}, kinds)
        if problems:
            raise InputError(bullet_list(f"{path} does not fit the model of this engine:", problems))
        reads = {name: stored[known].read for name, known in by_first.items()}
        together(context, what, lambda: _refuse_overflows({n: targets[n] for n in holding.in_fp16()}, reads))
        what += " when weights were changed already; make the engine anew"
        together(context, what, lambda: _read(targets, reads))
    holding.tell()


def _other_kinds(model: Mapping[str, str], saved: Mapping[str, str]) -> Iterator[str]:
    """Numbers of another kind than the model's: turning them into it would lose what they say."""
    other = [
        f"{name} ({saved[name]} in the file, {model[name]} here)"
        for name in sorted(model.keys() & saved.keys())
        if saved[name] != model[name]
    ]
    if other:
        yield f"other kinds of numbers: {shorten(other)}; convert them in the file"


def _refuse_overflows(targets: Pieces, stored: Mapping[str, Slicer]) -> None:
    """Raise InputError if a value of this rank's is beyond fp16: the file is read a first time for that."""
    for name, piece in targets.items():
        for region in piece.placement.regions:
            problem = find_overflow(name, stored[name](_box(region)), torch.float16)
            if problem is not None:
                raise InputError(problem)


@torch.no_grad()
def _read(targets: Pieces, stored: Mapping[str, Slicer]) -> None:
    for name, piece in targets.items():
        for region in piece.placement.regions:
            region.view(piece.held).copy_(stored[name](_box(region)))


def _box(region: Region) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(region.at, region.sizes, strict=True))
