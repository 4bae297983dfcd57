"""The whole model's weights alone, in files that other programs read and write."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..amp.precision import find_overflow
from ..errors import CheckpointError, InputError, bullet_list, did_you_mean
from ..parallel.context import ParallelContext
from ..parallel.regions import Shape
from . import storage
from .collective import run_on_all_ranks, run_on_rank_zero
from .state import Box, ShardedState, Shards, WholeTensor, describe, find_tensors
from .validate import model_problems

Format = Literal["safetensors", "torch"]
FORMATS = ("safetensors", "torch")
GIB = 2**30

# -- saving ------------------------------------------------------------------------------------------------------------


def save_weights(state: ShardedState, context: ParallelContext, path: Path, format: Format, max_file_gb: float) -> None:
    """`Engine.save_weights`."""
    if format not in FORMATS:
        raise InputError(f"format={format!r} is not one of {FORMATS}{did_you_mean(format, FORMATS)}")
    what = f"saving weights to {path} failed"
    shards, own_extras = run_on_all_ranks(context, what, lambda: (state.weights(), state.extras()))
    everyone = context.everyone((describe(shards), own_extras))
    extras = {key: value for _, theirs in everyone for key, value in theirs.items()}
    _refuse_extras(extras, format)
    aliases: dict[str, list[str]] = {}
    for name, first in state.division.first_names(state.model).items():
        aliases.setdefault(first, []).append(name)
    tensors = find_tensors([theirs for theirs, _ in everyone], spread=False)
    names = {name: aliases.get(name, [name]) for name in tensors}
    sizes = {name: t.nbytes * (len(names[name]) if format == "safetensors" else 1) for name, t in tensors.items()}
    files = _in_files(sizes, int(max_file_gb * GIB))
    places = [path.with_name(name) for name in _file_names(path, len(files))]
    for place, held in zip(places, files, strict=True):
        content = {
            alias: whole for name in held for alias, whole in _gather(name, names[name], tensors[name], shards, context)
        }
        run_on_rank_zero(
            context, what, partial(_write_file, content | (extras if place is places[-1] else {}), place, format)
        )
    weight_map = {
        n: place.name for place, held in zip(places, files, strict=True) for name in held for n in names[name]
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    run_on_rank_zero(context, what, partial(_complete, path, [place.name for place in places], weight_map, total))


def _refuse_extras(extras: Mapping[str, Any], format: str) -> None:
    if extras and format == "safetensors":
        raise InputError(
            f"the model's state dict holds more than tensors ({', '.join(sorted(extras))}), which safetensors cannot "
            "hold; use format='torch'"
        )
    for key, value in extras.items():
        storage.refuse_objects(key, value)


def _in_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Consecutive tensors of at most `limit` bytes together (a larger one stands alone)."""
    files: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def _gather(
    name: str, names: Sequence[str], tensor: WholeTensor, shards: Shards, context: ParallelContext
) -> Iterator[tuple[str, torch.Tensor]]:
    """On rank 0 the tensor, on the CPU, under all of its names; the other ranks send what they have of it."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype) if context.rank == 0 else None
    for box in tensor.boxes:
        part = shards[name].box(box.at).contiguous() if context.rank == box.rank else None
        if context.rank == box.rank != 0:
            dist.send(_as_bytes(part), 0)
        if target is not None:
            if part is None:
                part = torch.empty(box.sizes, dtype=tensor.dtype, device=context.device)
                dist.recv(_as_bytes(part), box.rank)
            target[_slices(box.at, box.sizes)] = part.cpu()
    if target is not None:
        yield from ((each, target) for each in names)


def _as_bytes(tensor: torch.Tensor | None) -> torch.Tensor:
    """The memory of a contiguous tensor: not every backend sends every dtype."""
    assert tensor is not None
    return tensor.view(-1).view(torch.uint8)


def _slices(at: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))


def _file_names(path: Path, count: int) -> list[str]:
    """As Hugging Face names them: model-00001-of-00002.safetensors."""
    if count == 1:
        return [path.name]
    return [f"{path.stem}-{number:05d}-of-{count:05d}{path.suffix}" for number in range(1, count + 1)]


def _write_file(tensors: Mapping[str, Any], path: Path, format: str) -> None:
    """Write CPU tensors; under its name when it is complete, and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    if format == "torch":
        torch.save(dict(tensors), unfinished)  # tied weights stay so
    else:
        safetensors = _import_safetensors()
        seen: set[int] = set()
        own = {}
        for name, tensor in tensors.items():  # one name each has its memory in such a file
            own[name] = tensor.clone() if tensor.data_ptr() in seen and tensor.numel() else tensor
            seen.add(tensor.data_ptr())
        safetensors.torch.save_file(own, unfinished, metadata={"format": "pt"})
    storage.sync(unfinished)
    os.replace(unfinished, path)


def _complete(path: Path, names: Sequence[str], weight_map: Mapping[str, str], total: int) -> None:
    """Write the index of several files, and remove what an earlier save to the same place has left."""
    index, kept = path.with_name(f"{path.name}.index.json"), set(names)
    if len(names) > 1:
        content = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        unfinished = index.with_name(f".{index.name}.tmp")
        storage.write_file(unfinished, content.encode())
        os.replace(unfinished, index)
        kept.add(index.name)
    of_parts = re.compile(rf"{re.escape(path.stem)}-\d{{5}}-of-\d{{5}}{re.escape(path.suffix)}")
    for other in path.parent.iterdir():
        if other.name not in kept and (other in (path, index) or of_parts.fullmatch(other.name)):
            other.unlink()
    storage.sync(path.parent)


# -- loading -----------------------------------------------------------------------------------------------------------

Reader = Callable[[Box], torch.Tensor]


def load_weights(state: ShardedState, context: ParallelContext, path: Path) -> None:
    """`Engine.load_weights`: each rank reads what it holds."""
    what = f"loading weights from {path} failed"
    targets, first = state.weight_targets(), state.division.first_names(state.model)
    with ExitStack() as opened:

        def look() -> dict[str, tuple[Shape, Callable[[tuple[slice, ...]], torch.Tensor]]]:
            files = [opened.enter_context(_open_file(file)) for file in _find_files(path)]
            return {first.get(name, name): tensor for file in files for name, tensor in file.items()}

        stored = run_on_all_ranks(context, what, look)
        shapes = {name: shard.placement.shape for name, shard in targets.items()}
        model = {name: shape for theirs in context.everyone(shapes) for name, shape in theirs.items()}
        saved = {name: shape for name, (shape, _) in stored.items()}
        problems = list(model_problems(model, saved, "the file"))
        if problems:
            raise InputError(bullet_list(f"{path} does not fit the model of this engine:", problems))

        def boxes(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
            for name in names:
                for region in targets[name].placement.regions:
                    yield name, region.view(targets[name].tensor), stored[name][1](_slices(region.at, region.sizes))

        def refuse_overflows() -> None:  # the file is read a first time for that
            for name, _, values in boxes([name for name in targets if name in in_fp16]):
                problem = find_overflow(name, values, torch.float16)
                if problem is not None:
                    raise InputError(problem)

        @torch.no_grad()
        def read() -> None:
            for _, target, values in boxes(list(targets)):
                target.copy_(values)

        in_fp16 = state.in_fp16()
        run_on_all_ranks(context, what, refuse_overflows)
        run_on_all_ranks(context, f"{what} when weights were changed already; make the engine anew", read)
    state.tell()


def _find_files(path: Path) -> list[Path]:
    """The files that hold the weights at `path`: itself, or those that its index names.

    Raises:
        CheckpointError: there are none, or the index names a file in another folder.
    """
    index = path if path.name.endswith(".index.json") else path.with_name(f"{path.name}.index.json")
    if path.is_file() and path != index:
        return [path]
    if not index.is_file():
        raise CheckpointError(f"there is no file {path}, and no {index.name}; give what save_weights was given")
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(
            f"{index} names {outside[0]!r}, which is not a file of its own folder; it was changed, or does not belong "
            "here"
        )
    return [index.with_name(name) for name in names]


@contextmanager
def _open_file(path: Path) -> Iterator[dict[str, tuple[Shape, Callable[[tuple[slice, ...]], torch.Tensor]]]]:
    """The tensors of a file: shape, and what reads a box of it. What is not a tensor is left out."""
    if path.suffix == ".safetensors":
        with _import_safetensors().safe_open(path, framework="pt") as file:
            found = {}
            for name in file.keys():  # noqa: SIM118 - it is no dict
                shape, read = file.get_slice(name).get_shape(), file.get_slice(name).__getitem__
                # A slice of a tensor without dims cannot be asked for.
                found[name] = tuple(shape), read if shape else _whole_reader(file, name)
            yield found
        return
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as weights, without running code ({str(error).partition(chr(10))[0]}); give a "
            "file of tensors by name, as torch.save(model.state_dict(), path) writes it"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}; give a file of tensors by name")
    yield {name: (tuple(t.shape), t.__getitem__) for name, t in state.items() if isinstance(t, torch.Tensor)}


def _whole_reader(file: Any, name: str) -> Callable[[tuple[slice, ...]], torch.Tensor]:
    return lambda _: file.get_tensor(name)


def _import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise InputError(
            "the format safetensors needs the package of that name: pip install safetensors; or use format='torch'"
        ) from error
    return safetensors
