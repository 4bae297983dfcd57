"""Puts together what the ranks of one copy hold of a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import optim

from ...shard import ParamShard
from ..objects import gather_objects


class Whole:
    """Joins parts along dim 0, as FSDP2 cuts them. All ranks of `group` call it together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = group.size()

    def state(self, optimizer: optim.Optimizer, part: ParamShard, shape: torch.Size) -> dict[str, Any]:
        """The whole state of a parameter. (A rank whose part is empty may have none.)"""
        state = optimizer.state.pop(part.param, {})
        mine = {n: v.dtype if is_cut(n, v, part.param) else None for n, v in state.items()}
        everyone = gather_objects(mine, self._group)
        joined = {n: v for n, v in state.items() if mine[n] is None}
        for name, dtype in sorted({(n, d) for theirs in everyone for n, d in theirs.items() if d}, key=str):
            joined[name] = self.join(state.get(name, torch.zeros_like(part.param, dtype=dtype)).detach(), shape)
        return joined

    def join(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What the ranks of one copy hold of a tensor, put together.

        (`DTensor.full_tensor` may look for a group of an engine that was closed before: torch remembers meshes by their
        ranks.)
        """
        rows = -(-shape[0] // self._ranks)
        own = part.new_zeros(rows, *shape[1:])
        own[: part.shape[0]].copy_(part)
        whole = part.new_empty(rows * self._ranks, *shape[1:])
        dist.all_gather_into_tensor(whole, own, group=self._group)
        return whole[: shape[0]].clone()


def is_cut(name: str, value: Any, param: torch.Tensor) -> bool:
    """Whether an entry of `param`'s state has an element for each of its own. (`step` is a counter, in torch's
    optimizers, and a scalar.)"""
    return isinstance(value, torch.Tensor) and value.shape == param.shape and name != "step"
