"""Python objects between ranks. In a dry run, where nobody else is there, all ranks have what this one has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import torch_private


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of `group` (None: of all) gave as `value`."""
    size = dist.get_world_size(group)
    if torch_private.is_alone(group):
        return [value] * size
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def broadcast_object(value: Any, place: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """What the rank at `place` of `group` (None: of all) gave as `value`."""
    if torch_private.is_alone(group):
        return value
    objects = [value]
    dist.broadcast_object_list(objects, group_src=place, group=group, device=device)
    return objects[0]
