"""`gradient_dtype="float32"`: gradients of half-precision parameters are added up in fp32."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle

from ..shard import ParamShard
from .recipe import HALF


def accumulate_in_fp32(shard: ParamShard) -> RemovableHandle | None:
    """Move each new gradient of `shard` into an fp32 `main_grad`; None for a parameter that has no need of it."""
    if shard.param.dtype not in HALF or not shard.param.requires_grad:
        return None

    def widen(_: torch.Tensor) -> None:
        if shard.main_grad is None and shard.param.grad is not None:
            shard.main_grad, shard.param.grad = shard.param.grad.float(), None
        shard.take_grad()

    return shard.param.register_post_accumulate_grad_hook(widen)
