"""Weights alone, for other programs: the whole model's, gathered from the ranks."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..errors import CheckpointError, InputError, bullet_list, did_you_mean
from ..parallel.mesh import ParallelContext
from ..parallel.rank_checks import gather_results, run_on_all_ranks, run_on_rank_zero
from ..parallel.shard_spec import Shape
from ..utils.log import get_logger
from . import storage
from .state import MODEL, ShardedState, Shards, WholeTensor, describe, find_tensors, join_groups, put_together
from .validate import model_problems

_log = get_logger(__name__)

Format = Literal["safetensors", "torch"]
FORMATS = ("safetensors", "torch")
GIB = 2**30

# -- saving ------------------------------------------------------------------------------------------------------------


def save_weights(state: ShardedState, context: ParallelContext, path: Path, format: Format, max_file_gb: float) -> None:
    """`Engine.save_weights`."""
    if format not in FORMATS:
        raise InputError(f"format={format!r} is not one of {FORMATS}{did_you_mean(format, FORMATS)}")
    what = f"saving weights to {path} failed"
    shards: Shards = {}

    def collect() -> tuple[dict[str, Any], dict[str, Any]]:
        shards.update(state.weights())
        return describe(shards), state.extras()

    shapes, all_extras = zip(*gather_results(context, what, collect), strict=True)
    extras = {key: value for theirs in all_extras for key, value in theirs.items()}
    if extras and format == "safetensors":
        raise InputError(
            f"the model's state dict holds more than tensors ({', '.join(sorted(extras))}), which safetensors cannot "
            "hold; use format='torch'"
        )
    storage.as_bytes(extras)
    tensors = find_tensors(shapes, spread=False)
    aliases = _aliases(state)
    names = {name: aliases.get(name, [name]) for name in tensors}
    nbytes = {name: torch.Size(tensor.shape).numel() * tensor.dtype.itemsize for name, tensor in tensors.items()}
    copies = {name: len(names[name]) if format == "safetensors" else 1 for name in tensors}
    files = _split({name: copies[name] * nbytes[name] for name in tensors}, int(max_file_gb * GIB))
    places = _places(path, len(files))
    for place, held in zip(places, files, strict=True):
        content: dict[str, Any] = {}
        for name in held:
            content |= dict.fromkeys(names[name], gather_tensor(name, tensors[name], shards, context))
        if place is places[-1]:
            content |= extras
        run_on_rank_zero(context, what, partial(_write_file, content, place, format))
    weight_map = {
        n: place.name for place, held in zip(places, files, strict=True) for name in held for n in names[name]
    }
    run_on_rank_zero(context, what, partial(_complete, path, places, weight_map, sum(nbytes.values())))


def _aliases(state: ShardedState) -> dict[str, list[str]]:
    """For the first name of each tensor of the full model, all of its names there (of tied weights)."""
    aliases: dict[str, list[str]] = {}
    for alias, first in state.parallel_model.first_names(state.model).items():
        aliases.setdefault(first, []).append(alias)
    return aliases


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Consecutive tensors of at most `limit` bytes together (a larger one is separate)."""
    files: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def _places(path: Path, count: int) -> list[Path]:
    """The paths of `count` files, named as in Hugging Face: model-00001-of-00002.safetensors."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{n:05d}-of-{count:05d}{path.suffix}") for n in range(1, count + 1)]


def _write_file(tensors: Mapping[str, Any], path: Path, format: str) -> None:
    """Write CPU tensors; the file gets its name when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    if format == "torch":
        torch.save(dict(tensors), unfinished)  # tied weights stay so
    else:
        first = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
        content = {n: tensor if first[id(tensor)] == n else tensor.clone() for n, tensor in tensors.items()}  # tied
        _import_safetensors().torch.save_file(content, unfinished, metadata={"format": "pt"})
    storage.sync(unfinished)
    os.replace(unfinished, path)


def _complete(path: Path, places: Sequence[Path], weight_map: Mapping[str, str], total: int) -> None:
    """Write the index of several files, and remove files of an earlier save to the same path."""
    index, kept = path.with_name(f"{path.name}.index.json"), {place.name for place in places}
    if len(places) > 1:
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

Readers = dict[str, tuple[Shape, Callable[[tuple[slice, ...]], torch.Tensor]]]
"""For each tensor of a file: its shape, and a function that reads a box of it."""


def load_weights(state: ShardedState, context: ParallelContext, path: Path) -> None:
    """`Engine.load_weights`: each rank reads its shards."""
    what = f"loading weights from {path} failed"
    targets, first = state.weight_targets(), state.parallel_model.first_names(state.model)
    with ExitStack() as opened:
        saved: Readers = {}

        def look() -> dict[str, Shape]:
            for file in _find_files(path):
                readers = opened.enter_context(_open_file(file))
                saved.update({first.get(name, name): reader for name, reader in readers.items()})
            return {name: shard.placement.shape for name, shard in targets.items()}

        model = {name: shape for shapes in gather_results(context, what, look) for name, shape in shapes.items()}
        problems = list(model_problems(model, {name: shape for name, (shape, _) in saved.items()}, "the file"))
        if problems:
            raise InputError(bullet_list(f"{path} does not fit the model of this engine:", problems))

        @torch.no_grad()
        def read() -> None:
            for name, shard in targets.items():
                for region in shard.placement.regions:
                    region.view(shard.tensor).copy_(saved[name][1](slices(region.at, region.sizes)))

        run_on_all_ranks(context, f"{what} after some weights had changed; create the engine again", read)
    state.publish()
    if state.average.values:
        state.average.restart()
        _log.info("the average of the weights restarts from those of %s", path)


def _find_files(path: Path) -> list[Path]:
    """The files that hold the weights at `path`: itself, or those that its index names."""
    index = path if path.name.endswith(".index.json") else path.with_name(f"{path.name}.index.json")
    if path.is_file() and path != index:
        return [path]
    if not index.is_file():
        raise CheckpointError(f"there is no file {path}, and no {index.name}; give what save_weights was given")
    weight_map = json.loads(index.read_bytes())["weight_map"]
    return [index.with_name(name) for name in sorted(set(weight_map.values()))]


@contextmanager
def _open_file(path: Path) -> Iterator[Readers]:
    """The tensors of a file; other values are left out."""
    if path.suffix == ".safetensors":
        with _import_safetensors().safe_open(path, framework="pt") as file:
            found: Readers = {}
            for name in file.keys():  # noqa: SIM118 - it is no dict
                tensor = file.get_slice(name)
                shape = tuple(tensor.get_shape())
                # A 0-dim tensor has no slices.
                found[name] = shape, tensor.__getitem__ if shape else file.get_tensor(name).__getitem__
            yield found
        return
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    yield {name: (tuple(t.shape), t.__getitem__) for name, t in state.items() if isinstance(t, torch.Tensor)}


def _import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise InputError(
            "the format safetensors needs the package of that name: pip install safetensors; or use format='torch'"
        ) from error
    return safetensors


def gather_tensor(
    name: str, tensor: WholeTensor, shards: Shards, context: ParallelContext, everywhere: bool = False
) -> torch.Tensor | None:
    """The full tensor on the CPU of rank 0, or of every rank with `everywhere`. All ranks together, box by box.

    Args:
        shards: this rank's shards, by the tensor's name.
    """
    gathered = torch.empty(tensor.shape, dtype=tensor.dtype) if everywhere or context.rank == 0 else None
    for box in tensor.boxes:
        if 0 in box.sizes:
            continue
        if context.rank == box.rank:
            part = shards[name].box(box.at).to(context.device).contiguous()
        elif gathered is not None:
            part = torch.empty(box.sizes, dtype=tensor.dtype, device=context.device)
        else:
            continue
        flat = part.view(-1).view(torch.uint8)  # as bytes: not every backend has every dtype
        if everywhere:
            dist.broadcast(flat, box.rank)
        elif box.rank != 0:
            if context.rank == 0:
                dist.recv(flat, box.rank)
            else:
                dist.send(flat, 0)
        if gathered is not None:
            gathered[slices(box.at, box.sizes)] = part.cpu()
    return gathered


def slices(at: Shape, sizes: Shape) -> tuple[slice, ...]:
    """The index of a box in the full tensor."""
    return tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))


# -- in memory ---------------------------------------------------------------------------------------------------------


def full_state_dict(state: ShardedState, context: ParallelContext, optimizer: bool, rank0_only: bool) -> dict[str, Any]:
    """`Engine.full_state_dict`. All ranks together, one tensor at a time."""
    shards: Shards = {}
    groups: list[dict[str, Any]] = []

    def collect() -> tuple[Any, ...]:
        shards.update({MODEL + name: shard for name, shard in state.weights().items()})
        plain: dict[str, dict[str, Any]] = {}
        if optimizer:
            state.update.follow_groups()  # groups added since the last step
            groups.extend(state.groups())
            of_optimizer, plain = state.optimizer_state()
            shards.update(of_optimizer)
        return describe(shards), state.extras(), plain, [group["params"] for group in groups]

    by_rank = gather_results(context, "engine.full_state_dict", collect)
    shapes, extras, plains, names = zip(*by_rank, strict=True)
    everywhere = not rank0_only and context.size > 1
    weights: dict[str, Any] = {}
    values: dict[str, dict[str, Any]] = {}
    for full_name, tensor in find_tensors(shapes, spread=False).items():
        value = gather_tensor(full_name, tensor, shards, context, everywhere)
        if value is None:
            continue
        if full_name.startswith(MODEL):
            weights[full_name.removeprefix(MODEL)] = value
        else:
            _, key, name = full_name.split(".", 2)
            values.setdefault(name, {})[key] = value
    if rank0_only and context.rank > 0:
        return {}
    aliases = _aliases(state)
    model = {alias: value for name, value in weights.items() for alias in aliases.get(name, [name])}
    for theirs in reversed(extras):
        model |= copy.deepcopy(theirs)
    if not optimizer:
        return model
    for theirs in reversed(plains):
        for name, plain in theirs.items():
            values.setdefault(name, {}).update(copy.deepcopy(plain))
    for of_param in values.values():
        put_together(of_param)
    settings = [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in groups]
    joined = [group | {"params": params} for group, params in zip(settings, join_groups(names), strict=True)]
    return {"model": model, "optimizer": {"state": values, "param_groups": joined}}
