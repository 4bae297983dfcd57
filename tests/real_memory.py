"""What a real run holds: the storages that operators made, without those of fake tensors and of the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.counts import StorageTracker
from halfmesh import torch_private


class RealTracker(StorageTracker):
    """Without what a pipeline does in a fake mode and on the meta device, to know the shapes between its stages."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch_private.in_fake_mode() or any(kind is FakeTensor for kind in types):  # so does DTensor
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._note(storage)
