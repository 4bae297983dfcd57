"""Sends Python objects, and tensors of unequal lengths, between ranks. In a dry run, which has one process, all ranks
have the values of this one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import InputError, show


def is_simulated(group: dist.ProcessGroup | None = None) -> bool:
    """Return True if `group` (None: all ranks) is that of a dry run, which sends nothing."""
    return dist.get_backend(group) == "fake"


def host_backend() -> str:
    """The backend of groups whose messages are between hosts."""
    return "fake" if is_simulated() else "gloo"


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The `value` of each rank of `group` (None: all ranks), on each of them. A single process needs no group."""
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size == 1:
        return [value]
    if is_simulated(group):
        return [value] * size
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def broadcast_object(value: Any, place: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """The `value` of the rank `place` of `group` (None: all ranks)."""
    if is_simulated(group):
        return value
    objects = [value]
    dist.broadcast_object_list(objects, group_src=place, group=group, device=device)
    return objects[0]


def join_rows(rows: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The rows [n, ...] of all ranks of `group` (None: all ranks), in order of rank; n may differ.

    Raises:
        InputError: dtypes, or shapes beyond dim 0, differ.
    """
    shapes = gather_objects((tuple(rows.shape), str(rows.dtype)), group)
    if len({(shape[1:], dtype) for shape, dtype in shapes}) > 1:
        raise InputError(
            f"context.gather joins tensors along dim 0, but the ranks gave {show(shapes)}; give all of them one dtype, "
            "and the same size in each other dim"
        )
    counts = [shape[0] for shape, _ in shapes]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
