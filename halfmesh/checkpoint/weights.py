"""engine.save_weights: the whole model's weights in files that other programs read, one of them at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..errors import InputError, did_you_mean, show
from ..parallel.context import ParallelContext
from ..parallel.regions import Shape
from . import folder as folders
from . import progress
from .contents import Holding, Pieces
from .together import on_first, together
from .weight_files import write_file

Format = Literal["safetensors", "torch"]
FORMATS = ("safetensors", "torch")
_FORMAT_OF = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
GIB = 2**30
MOST_GIB = 2**30
"""Of one file: what is larger than any model stands for no limit."""


@dataclass(frozen=True)
class Source:
    """A box of a tensor, and the rank that has it."""

    rank: int
    at: Shape
    sizes: Shape


@dataclass(frozen=True)
class Whole:
    """A tensor of the whole model, and where it is.

    Attributes:
        names: all that it has in the model's state dict, the first one first.
        sources: boxes that make all of it.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    sources: tuple[Source, ...]

    def nbytes(self, copies: bool) -> int:
        """What it takes in a file, once or for each of its names."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize * (len(self.names) if copies else 1)


def save_weights(
    holding: Holding, context: ParallelContext, given: str | Path, format: Format, max_file_gb: float
) -> None:
    """`Engine.save_weights`."""
    path = Path(given)
    what = f"saving weights to {path} failed"
    together(context, what, lambda: _refuse_arguments(given, format, max_file_gb))
    pieces = together(context, what, holding.weights)
    extras = {key: value for theirs in context.everyone(holding.extras()) for key, value in theirs.items()}
    together(context, what, lambda: _refuse_extras(extras, format))
    files = _in_files(_find_all(holding, pieces, context), int(max_file_gb * GIB), copies=format == "safetensors")
    names = _file_names(path, len(files))
    for number, (name, wholes) in enumerate(zip(names, files, strict=True)):
        tensors = dict(_gathered(wholes, pieces, context))
        if number + 1 == len(files):
            tensors |= extras
        place = path.with_name(name)
        on_first(context, what, partial(write_file, tensors, place, format))
    on_first(context, what, partial(_complete, path, names, files))


def _refuse_arguments(given: str | Path, format: str, max_file_gb: float) -> None:
    path = Path(given)
    if format not in FORMATS:
        raise InputError(f"format={format!r} is not one of {FORMATS}{did_you_mean(format, FORMATS)}")
    if type(max_file_gb) not in (int, float) or not 0 < max_file_gb < MOST_GIB:
        raise InputError(
            f"max_file_gb={show(max_file_gb)} is not a size of files in GiB; give a number above 0 and below {MOST_GIB}"
        )
    other = _FORMAT_OF.get(path.suffix, format)
    if other != format:
        fits = next(suffix for suffix, theirs in _FORMAT_OF.items() if theirs == format)
        raise InputError(
            f"{path} ends like a file of the format {other!r}, and format={format!r} was asked for; give "
            f"format={other!r}, or a name that ends with {fits}"
        )
    if path.is_dir() or os.fspath(given).endswith(os.sep):  # which a Path does not keep
        raise InputError(f"{path} is a folder; give the name of a file in it, such as {path / 'model.safetensors'}")


def _refuse_extras(extras: Mapping[str, Any], format: str) -> None:
    if extras and format == "safetensors":
        raise InputError(
            f"the model's state dict holds more than tensors ({', '.join(sorted(extras))}), which safetensors cannot "
            "hold; use format='torch'"
        )
    for key, value in extras.items():
        progress.refuse_objects(key, value)


def _find_all(holding: Holding, pieces: Pieces, context: ParallelContext) -> list[Whole]:
    """Every tensor of the whole model, in the model's order as far as ranks have one."""
    mine = {
        name: (piece.placement.shape, piece.held.dtype, [(r.at, r.sizes) for r in piece.placement.regions])
        for name, piece in pieces.items()
    }
    everyone = context.everyone(mine)
    aliases: dict[str, list[str]] = {}
    for name, first in holding.division.first_names(holding.model).items():
        aliases.setdefault(first, []).append(name)
    found = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        sources: dict[Shape, Source] = {}
        for rank, theirs in enumerate(everyone):
            for at, sizes in theirs[name][2] if name in theirs else ():
                sources.setdefault(at, Source(rank, at, sizes))
        shape, dtype = next(theirs[name][:2] for theirs in everyone if name in theirs)
        found.append(Whole(tuple(aliases.get(name, [name])), shape, dtype, tuple(sources.values())))
    return found


def _in_files(wholes: Sequence[Whole], limit: int, copies: bool) -> list[list[Whole]]:
    """Consecutive tensors of at most `limit` bytes together (a larger one stands alone)."""
    files: list[list[Whole]] = [[]]
    room = limit
    for whole in wholes:
        if whole.nbytes(copies) > room and files[-1]:
            files.append([])
            room = limit
        files[-1].append(whole)
        room -= whole.nbytes(copies)
    return files


def _gathered(wholes: Sequence[Whole], pieces: Pieces, context: ParallelContext) -> Iterator[tuple[str, torch.Tensor]]:
    """On rank 0 the tensors, on the CPU, under all of their names; the other ranks send what they have of them."""
    for whole in wholes:
        target = torch.empty(whole.shape, dtype=whole.dtype) if context.rank == 0 else None
        for source in whole.sources:
            box = _sent(source, whole, pieces, context)
            if target is not None and box is not None:
                target[tuple(slice(a, a + n) for a, n in zip(source.at, source.sizes, strict=True))] = box.cpu()
        if target is not None:
            yield from ((name, target) for name in whole.names)


def _sent(source: Source, whole: Whole, pieces: Pieces, context: ParallelContext) -> torch.Tensor | None:
    """The box, on rank 0; on other ranks nothing, after it was sent where this is the rank that has it."""
    if context.rank not in (0, source.rank):
        return None
    box = None
    if context.rank == source.rank:
        piece = pieces[whole.names[0]]
        region = next(region for region in piece.placement.regions if region.at == source.at)
        box = region.view(piece.held).contiguous()
    if source.rank != 0:
        if box is not None:
            dist.send(_as_bytes(box), 0)
            return None
        box = torch.empty(source.sizes, dtype=whole.dtype, device=context.device)
        dist.recv(_as_bytes(box), source.rank)
    return box


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: not every backend sends every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _file_names(path: Path, count: int) -> list[str]:
    """As Hugging Face names them: model-00001-of-00002.safetensors."""
    if count == 1:
        return [path.name]
    return [f"{path.stem}-{number:05d}-of-{count:05d}{path.suffix}" for number in range(1, count + 1)]


def _complete(path: Path, names: Sequence[str], files: Sequence[Sequence[Whole]]) -> None:
    """Write what tells of several files, and remove what an earlier save to the same place has left."""
    index, kept = path.with_name(f"{path.name}.index.json"), set(names)
    if len(names) > 1:
        in_files = [(name, whole) for name, wholes in zip(names, files, strict=True) for whole in wholes]
        places = {each: name for name, whole in in_files for each in whole.names}
        total = sum(whole.nbytes(copies=False) for _, whole in in_files)
        unfinished = index.with_name(f".{index.name}.tmp")
        unfinished.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1))
        folders.sync(unfinished)
        os.replace(unfinished, index)
        kept.add(index.name)
    of_parts = re.compile(rf"{re.escape(path.stem)}-\d{{5}}-of-\d{{5}}{re.escape(path.suffix)}")
    for other in _others(path, index, of_parts):
        if other.name not in kept:
            other.unlink()
    folders.sync(path.parent)


def _others(path: Path, index: Path, of_parts: re.Pattern[str]) -> Iterable[Path]:
    return [other for other in path.parent.iterdir() if other in (path, index) or of_parts.fullmatch(other.name)]
