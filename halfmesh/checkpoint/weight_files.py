"""One file of weights: safetensors, or torch's own, read without running code."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, InputError
from . import folder as folders


def write_file(tensors: Mapping[str, Any], path: Path, format: str) -> None:
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
    folders.sync(unfinished)
    os.replace(unfinished, path)


def find_files(path: Path) -> list[Path]:
    """The files that hold the weights at `path`: itself, or those that its index names.

    Raises:
        CheckpointError: there are none, or the index names a file in another folder.
    """
    index = path if path.name.endswith(".index.json") else path.with_name(f"{path.name}.index.json")
    if path.is_file() and path != index:
        return [path]
    if not index.is_file():
        raise CheckpointError(f"there is no file {path}, and no {index.name}; give what save_weights was given")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of weights ({type(error).__name__}: {error})") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise CheckpointError(
            f"{index} names {outside[0]!r}, which is not a file of its own folder; it was changed, or does not belong "
            "here"
        )
    return [index.with_name(name) for name in names]


Slicer = Callable[[tuple[slice, ...]], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: reads the boxes that are asked for."""

    shape: tuple[int, ...]
    kind: str
    """"floating point", "complex", "integer" or "bool"."""
    read: Slicer


def _kind_by_name(dtype: str) -> str:
    """As safetensors names them: BF16, F8_E4M3, C64, U8, BOOL."""
    if dtype == "BOOL":
        return "bool"
    return {"F": "floating point", "B": "floating point", "C": "complex"}.get(dtype[0], "integer")


def kind_of(tensor: torch.Tensor) -> str:
    """Which kind of number a tensor has."""
    if tensor.dtype == torch.bool:
        return "bool"
    return "floating point" if tensor.is_floating_point() else "complex" if tensor.is_complex() else "integer"


@contextmanager
def open_file(path: Path) -> Iterator[dict[str, Stored]]:
    """The tensors of a file. What is not a tensor is left out."""
    if path.suffix == ".safetensors":
        with _import_safetensors().safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            yield {
                name: Stored(tuple(part.get_shape()), _kind_by_name(part.get_dtype()), _slicer(file, name, part))
                for name, part in slices.items()
            }
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
    yield {
        name: Stored(tuple(tensor.shape), kind_of(tensor), tensor.__getitem__)
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }


def _slicer(file: Any, name: str, part: Any) -> Slicer:
    """(A slice of a tensor without dims cannot be asked for.)"""
    return lambda box: part[box] if box else file.get_tensor(name)


def _import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise InputError(
            "the format safetensors needs the package of that name: pip install safetensors; or use format='torch'"
        ) from error
    return safetensors
