"""Tensor files, through torch.distributed.checkpoint (DCP). Each rank writes and reads its own boxes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .full_state import WholeTensor
from .state import Boxes, Shards

METADATA = ".metadata"
_COPY_AHEAD = 10_000_000
"""Bytes that are copied from a GPU before they are written: torch's default."""


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, boxes: Boxes) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = boxes

    def lookup_object(self, index: meta.MetadataIndex) -> torch.Tensor:
        return self._boxes[index.fqn, tuple(index.offset or ())]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, shards: Shards) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def lookup_tensor(self, index: meta.MetadataIndex) -> torch.Tensor:
        return self._shards[index.fqn].box(tuple(index.offset or ()))


def write(boxes: Boxes, tensors: Mapping[str, WholeTensor], folder: Path, rank: int) -> list[Any]:
    """Write this rank's boxes of `tensors`. Returns the results for `finish`, on rank 0."""
    items = []
    for (name, at), box in boxes.items():
        chunk, shape = meta.ChunkStorageMetadata(torch.Size(at), box.shape), torch.Size(tensors[name].shape)
        data = TensorWriteData(chunk, meta.TensorProperties(dtype=box.dtype), shape)
        items.append(WriteItem(meta.MetadataIndex(name, at), WriteItemType.SHARD, tensor_data=data))
    # Copying ahead waits for the GPU's stream: a background save, which has nothing to copy, would wait for training.
    ahead = _COPY_AHEAD if any(box.is_cuda for box in boxes.values()) else 0
    writer = dcp.FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=ahead)
    plan = writer.prepare_global_plan([SavePlan(items)] * (rank + 1))[rank]  # names the file after the rank
    return writer.write_data(plan, _SavePlanner(boxes)).wait() if items else []


def finish(tensors: Mapping[str, WholeTensor], results: Sequence[list[Any]], folder: Path) -> None:
    """Write `.metadata`, the index of all tensors. On rank 0.

    Args:
        results: the result of `write` on each rank.
    """
    described = dict[str, Any]()
    for name, tensor in tensors.items():
        chunks = [meta.ChunkStorageMetadata(torch.Size(box.at), torch.Size(box.sizes)) for box in tensor.boxes]
        properties = meta.TensorProperties(dtype=tensor.dtype)
        described[name] = meta.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    dcp.FileSystemWriter(folder, sync_files=True).finish(meta.Metadata(described), list(results))


_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))),
    "pathlib": ("Path", "PosixPath"),
    "pathlib._local": ("Path", "PosixPath"),
}
"""The classes that DCP writes into `.metadata`."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed there")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> meta.Metadata:
    """Read the metadata that `finish` wrote. (DCP uses a plain `pickle.load`, which can run code from the file.)"""
    with open(folder / METADATA, "rb") as file:
        metadata: meta.Metadata = _MetadataUnpickler(file).load()
    return metadata


@torch.no_grad()
def read(shards: Shards, metadata: meta.Metadata, folder: Path) -> None:
    """Read this rank's shards, in place; the tensors may have been saved in any boxes."""
    items = []
    for name, shard in shards.items():
        saved = metadata.state_dict_metadata[name]
        assert isinstance(saved, meta.TensorStorageMetadata)
        boxes = [meta.ChunkStorageMetadata(torch.Size(r.at), torch.Size(r.sizes)) for r in shard.placement.regions]
        items += create_read_items_for_chunk_list(name, saved, boxes)
    reader = dcp.FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(LoadPlan(items), _LoadPlanner(shards)).wait()
