"""Nested tensors of all ranks, on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..parallel.comm import is_simulated
from ..parallel.mesh import ParallelContext
from ..parallel.rank_checks import as_bytes
from ..utils.tensors import map_tensors, tensors_of

CHUNK = 64 * 2**20
"""Bytes that are sent at once."""


def gather_tensors(value: Any, context: ParallelContext) -> list[Any]:
    """The `value` of each rank, by rank, on all of them: nested tensors on the CPU, of any shapes.

    One rank sends at a time, in chunks: so a device holds one of these, and not what all ranks have.
    """
    if context.size == 1 or is_simulated():
        return context.everyone(value)
    own: list[torch.Tensor] = []

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_nested:
            return tensor  # sent as an object
        own.append(tensor)
        return torch.empty_like(tensor, device="meta")

    found = []
    for rank, form in enumerate(context.everyone(map_tensors(without_values, value))):
        sizes = [tensor.nbytes for tensor in tensors_of(form) if tensor.is_meta]
        content = torch.empty(sum(sizes), dtype=torch.uint8)
        if rank == context.rank and own:
            torch.cat(list(map(as_bytes, own)), out=content)
        for chunk in content.split(CHUNK) if len(content) else ():
            sent = chunk.to(context.device)
            dist.broadcast(sent, rank)
            if sent.is_cuda:
                chunk.copy_(sent)
        parts = iter(content.split(sizes))
        found.append(map_tensors(partial(_with_values, parts), form))
    return found


def _with_values(parts: Iterator[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the next part as its values, if they were sent."""
    return next(parts).clone().view(tensor.dtype).view(tensor.shape) if tensor.is_meta else tensor
