"""What a real run holds: the storages that operators made, without those of fake tensors and of the meta device."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.counts import StorageTracker
from halfmesh.utils.torch_private import in_shapes_only


class RealTracker(StorageTracker):
    """Without what a pipeline does in a fake mode and on the meta device, to know the shapes between its stages."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_shapes_only() or any(kind is FakeTensor for kind in types):  # so does DTensor
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._note(storage)

    def settled(self) -> int:
        """Bytes alive once nothing but their owners holds them.

        A thread of gloo keeps the tensors of its last collective a moment longer than the rank that waited for it, and
        on a busy machine the moment is long: one look too many was seen 64 KiB above the rest.
        """
        gc.collect()
        for _ in range(20):
            time.sleep(0.02)  # gives up the interpreter's lock, which that thread needs to let go
            self.look_again()
        return self.alive
