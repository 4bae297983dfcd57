"""Casts weights before FSDP2 gathers them, to one byte per element."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...utils.param_shard import GatherCast


class CastGather:
    """Casts weights of one unit before FSDP2 gathers them, which it does together and in the same order each time.

    FSDP2 calls a shard's `fsdp_pre_all_gather` for the tensor to send, and its `fsdp_post_all_gather` for the parameter
    that the model computes with. They are attributes here: a subclass of torch.Tensor would be seen by optimizers and
    checkpoints, too.

    Args:
        weights: DTensors of which every rank holds the same number of rows.
        casts: one for each.
    """

    def __init__(self, weights: Sequence[Any], casts: Sequence[GatherCast]) -> None:
        self._weights = weights
        self._casts = casts
        self._scales: list[Any] = [None] * len(weights)
        self._first: int | None = None
        self._largest = torch.empty(0)

    def attach(self, *_: Any) -> None:
        """Set the shards' attributes: again after `model.to(device)`, even to the same one, which replaces them."""
        for place, weight in enumerate(self._weights):
            shard = weight._local_tensor
            if not hasattr(shard, "fsdp_pre_all_gather"):
                shard.fsdp_pre_all_gather = partial(self._pack, place)
                shard.fsdp_post_all_gather = partial(self._unpack, place)

    def _pack(
        self, place: int, mesh: DeviceMesh, size: Any, stride: Any, module: Any, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[torch.Tensor], None]:
        shards = [weight._local_tensor for weight in self._weights]
        dtype = policy.param_dtype or shards[place].dtype
        if self._first in (None, place):
            self._first = place
            # One all-reduce for all, each time: a write of the user into a weight cannot be detected.
            self._largest = torch.stack([torch.linalg.vector_norm(shard, torch.inf) for shard in shards])
            dist.all_reduce(self._largest, dist.ReduceOp.MAX, mesh.get_group())
        data, scale = self._casts[place].pack(shards[place].to(dtype), self._largest[place].to(dtype))
        if self._scales[place] is None:
            self._scales[place] = scale
        else:
            # .data, which counts no write: backward would refuse the tensor. FSDP2 writes in this way, too.
            self._scales[place].data.copy_(scale)
        return (data,), None

    def _unpack(
        self, place: int, gathered: tuple[torch.Tensor], _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        if out is None:  # later FSDP2 writes into the same memory
            return self._casts[place].unpack(*gathered, self._scales[place], dtype), gathered
        return None
