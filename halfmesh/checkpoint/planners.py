"""torch.distributed.checkpoint (DCP) for pieces: which rank writes and reads which boxes of which tensors."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..errors import CheckpointError
from .contents import Piece, Pieces
from .forms import refuse_metadata

COPIED_AHEAD = 10_000_000
"""Bytes that are copied from a GPU before they are written: torch's default."""


class PieceSavePlanner(DefaultSavePlanner):
    """Each rank offers what it holds; of what several hold, one writes it, so that all write about as much."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, piece in self.state_dict.items() for item in _write_items(name, piece)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return _find(self.state_dict[index.fqn], index)


class PieceLoadPlanner(DefaultLoadPlanner):
    """Each rank reads what it holds, in place, from whatever boxes the tensors were saved in."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = (
            state_dict,
            metadata,
            is_coordinator,
        )  # torch's takes tensors

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, _chunks(piece))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _find(self.state_dict[index.fqn], index)


_PATHS = ("Path", "PosixPath")
_IN_METADATA = {"torch.serialization": ("_get_layout",), "pathlib": _PATHS, "pathlib._local": _PATHS}  # Python 3.13
_OF_METADATA = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _MetadataUnpickler(pickle.Unpickler):
    """Makes plain data of what DCP writes into `.metadata`, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _OF_METADATA:  # dataclasses and enums of values
            found = super().find_class(module, name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        is_plain = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if not is_plain and name not in _IN_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)


def read_metadata_file(path: Path) -> Metadata:
    """The `.metadata` of a folder of DCP, which itself reads it with a plain `pickle.load`.

    Raises:
        pickle.UnpicklingError: it holds something else.
    """
    with open(path, "rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


class SafeReader(dcp.FileSystemReader):
    """Reads a folder that somebody else may have written: no code in it is run, and no file outside of it is opened.

    Args:
        files: the files that belong to the checkpoint, with their sizes in bytes.
    """

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files = files
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What tensors there are, and where. Read once: what is used is what was checked.

        Raises:
            CheckpointError: it holds something else, or names files that are not the checkpoint's.
        """
        if self._metadata is not None:
            return self._metadata
        path = self._folder / ".metadata"
        metadata = read_metadata_file(path)
        outside = {info.relative_path for info in metadata.storage_data.values()} - self._files.keys()
        if outside:
            raise CheckpointError(
                f"{path} says that tensors are in {sorted(map(str, outside))}, which are not files of this checkpoint; "
                "it was changed, or does not belong here: take another checkpoint"
            )
        refuse_metadata(metadata, self._files)
        self._metadata = metadata
        return metadata


def write(pieces: Pieces, folder: Path, alone: bool, group: dist.ProcessGroup | None = None) -> int:
    """Write what all ranks hold into `folder`, which is there and empty. All ranks together, if not `alone`. Returns
    the number of tensors.

    Args:
        group: of all ranks, for what they tell each other; None: torch's default one.
    """
    # Copies from a GPU that go ahead wait for its stream, all 10 MB: with nothing to copy, for the training beside it.
    from_gpu = any(piece.held.is_cuda for piece in pieces.values())
    ahead = COPIED_AHEAD if from_gpu else 0
    writer = dcp.FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=ahead)
    planner = PieceSavePlanner()
    if alone:
        metadata = _write_alone(pieces, writer, planner)
    else:
        metadata = dcp.save(dict(pieces), storage_writer=writer, planner=planner, process_group=group)
    return len(metadata.state_dict_metadata)


def _write_alone(pieces: Pieces, writer: dcp.FileSystemWriter, planner: PieceSavePlanner) -> Metadata:
    """(`dcp.save` warns of a single process, and a thread cannot silence that for itself.)"""
    planner.set_up_planner(dict(pieces), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    final = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(final, planner).wait()])
    return metadata


def read(pieces: Pieces, reader: SafeReader, alone: bool) -> None:
    """Read what this rank holds, in place. All ranks together, if not `alone`."""
    with _no_word_of_being(alone):
        dcp.load(dict(pieces), storage_reader=reader, planner=PieceLoadPlanner(), no_dist=alone)


@contextmanager
def _no_word_of_being(alone: bool) -> Iterator[None]:
    """torch warns of a single process, which is what was asked for."""
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _chunks(piece: Piece) -> list[ChunkStorageMetadata]:
    regions = piece.placement.regions
    return [ChunkStorageMetadata(torch.Size(region.at), torch.Size(region.sizes)) for region in regions]


def _write_items(name: str, piece: Piece) -> list[WriteItem]:
    properties = TensorProperties(dtype=piece.held.dtype)
    size = torch.Size(piece.placement.shape)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in _chunks(piece)
    ]


def _find(piece: Piece, index: MetadataIndex) -> torch.Tensor:
    assert index.offset is not None
    region = next(region for region in piece.placement.regions if region.at == tuple(index.offset))
    return region.view(piece.held)
