"""Writes the full model's weights, gathered from the ranks, for other programs."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

from ..errors import CheckpointError, InputError, bullet_list, did_you_mean
from ..parallel.mesh import ParallelContext
from ..parallel.models.peft import base_model
from ..parallel.shard_spec import Shape, narrow
from ..utils.log import get_logger
from ..utils.tensors import by_bytes, in_memory_order
from . import storage
from .agreement import gather_results, run_on_all_ranks, run_on_rank_zero
from .full_state import WholeTensor
from .state import MODEL, ShardedState, Shards, rebuild_compound
from .validate import model_problems

_log = get_logger(__name__)

Format = Literal["safetensors", "torch"]
FORMATS = ("safetensors", "torch")

# -- saving ------------------------------------------------------------------------------------------------------------


def save_weights(
    state: ShardedState, context: ParallelContext, given: str | Path, format: Format, max_file_gb: float
) -> None:
    """`Engine.save_weights`, to the path `given`."""
    if format not in FORMATS:
        raise InputError(f"format={format!r} is not one of {FORMATS}{did_you_mean(format, FORMATS)}")
    path, what = Path(given), f"saving weights to {given} failed"
    if str(given).endswith(os.sep) or run_on_rank_zero(context, what, path.is_dir):
        raise InputError(f"{what}: that is a folder; give a file, such as {str(path / 'model.safetensors')!r}")
    found = state.collect(context, what)
    if found.extras and format == "safetensors":
        raise InputError(f"safetensors cannot hold {', '.join(sorted(found.extras))}; use format='torch'")
    storage.as_bytes(found.extras)
    names = _find_aliases(state, found.tensors)
    copies = {full: len(aliases) if format == "safetensors" else 1 for full, aliases in names.items()}
    nbytes = {full: copies[full] * torch.Size(t.shape).numel() * t.dtype.itemsize for full, t in found.tensors.items()}
    files = by_bytes(names, max_file_gb * 2**30, nbytes.__getitem__) or [[]]
    paths = [path]
    if len(files) > 1:  # named as in Hugging Face: model-00001-of-00002.safetensors
        numbers = (f"-{number:05d}-of-{len(files):05d}" for number in range(1, len(files) + 1))
        paths = [path.with_name(f"{path.stem}{number}{path.suffix}") for number in numbers]
    weight_map: dict[str, str] = {}
    for file, held in zip(paths, files, strict=True):
        content: dict[str, Any] = dict(found.extras) if file is paths[-1] else {}
        for full in held:
            content |= dict.fromkeys(names[full], gather_tensor(full, found.tensors[full], found.shards, context))
            weight_map |= dict.fromkeys(names[full], file.name)
        run_on_rank_zero(context, what, partial(_write_file, content, file, format))
    index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map}
    run_on_rank_zero(context, what, lambda: _complete(path, paths, index))


def _find_aliases(state: ShardedState, tensors: Iterable[str]) -> dict[str, list[str]]:
    """All names of each tensor of the full model (of tied weights)."""
    names: dict[str, list[str]] = {}
    for alias, first in state.parallel_model.first_names(state.model).items():
        names.setdefault(MODEL + first, []).append(alias)
    return {full: names.get(full, [full.removeprefix(MODEL)]) for full in tensors if full.startswith(MODEL)}


def _write_file(tensors: Mapping[str, Any], path: Path, format: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "torch":
        _replace(path, lambda unfinished: torch.save(dict(tensors), unfinished))  # tied weights stay so
        return
    from safetensors.torch import save_file

    first = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    content = {name: tensor if first[id(tensor)] == name else tensor.clone() for name, tensor in tensors.items()}
    _replace(path, lambda unfinished: save_file(content, unfinished, metadata={"format": "pt"}))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that gets its name when it is complete and on disk."""
    unfinished = path.with_name(f".{path.name}.tmp")
    write(unfinished)
    storage.sync(unfinished)
    os.replace(unfinished, path)


def _complete(path: Path, paths: Sequence[Path], content: Mapping[str, Any]) -> None:
    """Write the index of several files, and remove what an earlier save to the same path would load instead."""
    index = path.with_name(f"{path.name}.index.json")
    if len(paths) > 1:
        _replace(index, lambda unfinished: unfinished.write_text(json.dumps(content, indent=1)))
    (path if len(paths) > 1 else index).unlink(missing_ok=True)
    storage.sync(path.parent)


# -- loading -----------------------------------------------------------------------------------------------------------


def load_weights(state: ShardedState, context: ParallelContext, path: Path) -> None:
    """`Engine.load_weights`: each rank reads its shards."""
    what = f"loading weights from {path} failed"
    targets, first = state.weight_targets(), state.parallel_model.first_names(state.model)
    with ExitStack() as opened:
        saved: dict[str, Any] = {}

        def find_tensors() -> dict[str, Shape]:
            for file in _find_files(path):
                saved.update({first.get(name, name): tensor for name, tensor in _open_file(file, opened).items()})
            return {name: shard.placement.shape for name, shard in targets.items()}

        everyone = gather_results(context, what, find_tensors)
        model = {name: shape for shapes in everyone for name, shape in shapes.items()}
        shapes = {name: tuple(t.shape if isinstance(t, torch.Tensor) else t.get_shape()) for name, t in saved.items()}
        problems = list(model_problems(model, shapes, "the file"))
        if problems:
            raise InputError(bullet_list(f"{path} does not fit the model of this engine:", problems))

        @torch.no_grad()
        def read() -> None:
            for name, shard in targets.items():
                for region in shard.placement.regions:
                    region.view(shard.tensor).copy_(narrow(saved[name], region.at, region.sizes))

        run_on_all_ranks(context, f"{what} after some weights had changed; create the engine again", read)
    state.publish()
    if state.average.values:
        state.average.restart()
        _log.info("the average of the weights restarts from the weights in %s", path)


def _find_files(path: Path) -> list[Path]:
    """The files that hold the weights at `path`: itself, or those that its index names."""
    index = path if path.name.endswith(".index.json") else path.with_name(f"{path.name}.index.json")
    if path.is_file() and path != index:
        return [path]
    if not index.is_file():
        raise CheckpointError(f"there is no file {path}, and no {index.name}; give the path that you gave save_weights")
    weight_map = json.loads(index.read_bytes())["weight_map"]
    return [index.with_name(name) for name in sorted(set(weight_map.values()))]


def _open_file(path: Path, opened: ExitStack) -> dict[str, Any]:
    """The tensors of a file, to be sliced while `opened` is; other values are left out."""
    if path.suffix != ".safetensors":
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    from safetensors import safe_open

    file = opened.enter_context(safe_open(path, framework="pt"))
    tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    # A 0-dim tensor has no slices.
    return {name: tensor if tensor.get_shape() else file.get_tensor(name) for name, tensor in tensors.items()}


def gather_tensor(
    name: str, tensor: WholeTensor, shards: Shards, context: ParallelContext, everywhere: bool = False
) -> torch.Tensor | None:
    """The full tensor on the CPU of rank 0, or of every rank with `everywhere`. All ranks together, box by box.

    Args:
        shards: this rank's shards, by the tensor's name.
    """
    gathered = torch.empty(tensor.shape, dtype=tensor.dtype) if everywhere or context.rank == 0 else None
    for box in tensor.boxes:
        is_sent = 0 not in box.sizes and (everywhere or box.rank != 0)
        if context.rank == box.rank:
            values = shards[name].box(box.at).to(context.device).contiguous()
        else:
            values = torch.empty(box.sizes if is_sent else 0, dtype=tensor.dtype, device=context.device)
        if is_sent:
            # As bytes: not every backend has every dtype.
            dist.broadcast(in_memory_order(values).view(torch.uint8), box.rank)
        if gathered is not None and 0 not in box.sizes:
            narrow(gathered, box.at, box.sizes).copy_(values)
    return gathered


# -- in memory ---------------------------------------------------------------------------------------------------------


def full_state_dict(
    state: ShardedState,
    context: ParallelContext,
    optimizer: bool = False,
    rank0_only: bool = True,
    only: Container[str] | None = None,
) -> dict[str, Any]:
    """`Engine.full_state_dict`. All ranks together, one tensor at a time; with `only` those that have such a name."""
    found = state.collect(context, "engine.full_state_dict", optimizer)
    everywhere = not rank0_only and context.size > 1
    aliases = _find_aliases(state, found.tensors)
    full = {
        name: gather_tensor(name, tensor, found.shards, context, everywhere)
        for name, tensor in found.tensors.items()
        if only is None or any(alias in only for alias in aliases.get(name, ()))
    }
    if rank0_only and context.rank > 0:
        return {}
    model = dict[str, Any]()
    extras, values, groups = copy.deepcopy((found.extras, found.plain, found.groups))
    for full_name, tensor in full.items():
        if full_name in aliases:
            model |= dict.fromkeys(aliases[full_name], tensor)
        else:
            _, key, name = full_name.split(".", 2)
            values.setdefault(name, {})[key] = tensor
    model |= extras
    if not optimizer:
        return model
    values = {name: rebuild_compound(of_param) for name, of_param in values.items()}
    return {"model": model, "optimizer": {"state": values, "param_groups": groups}}


def save_pretrained(
    state: ShardedState, context: ParallelContext, folder: str | Path, dtype: torch.dtype | None, options: Any
) -> None:
    """`Engine.save_pretrained`. All ranks together."""
    model: Any = state.model
    names = _names_of_adapter(model, options.get("selected_adapters"))
    # Others would write what this rank holds: diffusers' and the hub's mixin look at the model's own state dict.
    if names is None and "state_dict" not in inspect.signature(getattr(model, "save_pretrained", len)).parameters:
        kind = type(model).__name__
        raise InputError(f"a {kind} has no save_pretrained(folder, state_dict=...); use engine.save_weights(path)")
    weights = full_state_dict(state, context, only=names)
    if dtype is not None:
        cast = {id(value): value.to(dtype) for value in weights.values() if value.is_floating_point()}  # ties stay
        weights = {name: cast.get(id(value), value) for name, value in weights.items()}

    def write() -> None:
        with ExitStack() as scope:
            config: Any = getattr(model, "config", None)
            kind = type(model)
            if dtype is not None and hasattr(config, "dtype") and isinstance(getattr(kind, "dtype", None), property):
                # transformers writes the model's dtype into its config, which from_pretrained loads, and to the hub.
                scope.callback(setattr, config, "dtype", config.dtype)
                scope.enter_context(patch.object(kind, "dtype", dtype))
            model.save_pretrained(folder, state_dict=weights, **options)

    run_on_rank_zero(context, f"saving to {folder} failed", write)


def _names_of_adapter(model: Any, selected: Sequence[str] | None) -> set[str] | None:
    """The names in the state dict of what PEFT writes of a model with adapters, or of those that are `selected`; None
    for other models."""
    if base_model(model) is model:
        return None
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(0) for name in model.state_dict()}
    written: set[int] = set()
    for adapter in selected or model.peft_config:
        found = get_peft_model_state_dict(model, state_dict=dict(stand_ins), adapter_name=adapter)
        written.update(map(id, found.values()))
    return {name for name, value in stand_ins.items() if id(value) in written}
