"""Counts the memory that a forward leaves behind for its backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Made(TorchDispatchMode):
    """Remembers the memory of every result that is not an argument's."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bytes_left(forward: Callable[[], Any]) -> int:
    """The bytes that `forward` made and that are still there while what it returned is; besides that itself."""
    with _Made() as made:
        result = forward()
    if dist.is_initialized():
        time.sleep(0.5)  # gloo's threads hold what they sent until they run again, after the collective has returned
    own = {storage._cdata for storage in _storages(result)}
    return sum(size for key, (ref, size) in made.storages.items() if key not in own and not ref.expired())
