"""fp32 master weights: the optimizer holds them in place of the model's half-precision parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from .. import torch_private
from ..shard import ParamShard

STREAM_BYTES = 25 * 2**20
"""fp32 copies of half-precision gradients are made for so much at a time."""


def make_master(param: torch.Tensor) -> nn.Parameter:
    """An fp32 copy of `param`. Of an fp32 parameter it takes over the memory, so cast the model afterwards; not of a
    part of one, though, which would keep the memory of all of it."""
    value = param.detach().float()
    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
        value = value.clone()
    return nn.Parameter(value, requires_grad=True)


def masters_for(
    optimizer: torch.optim.Optimizer,
    shards: Sequence[ParamShard],
    known: Mapping[nn.Parameter, nn.Parameter],
    full: Callable[[nn.Parameter], torch.Tensor] = torch.Tensor.detach,
) -> dict[nn.Parameter, nn.Parameter]:
    """The master of each parameter of `shards` that `optimizer` holds itself; made of what is `full` if not `known`."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    raw = [s.param for s in shards if id(s.param) in held]
    return {param: known[param] if param in known else make_master(full(param)) for param in raw}


def repoint(optimizer: torch.optim.Optimizer, replace: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make `optimizer`'s groups and state hold `replace[param]` instead of `param`. Groups are changed in place."""
    for group in optimizer.param_groups:
        group["params"][:] = [replace.get(param, param) for param in group["params"]]
    for old, new in replace.items():
        if old is not new and old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {name: _to_dtype_of(new, old, value) for name, value in state.items()}


def cast_state(optimizer: torch.optim.Optimizer, dtypes: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Give state that has the dtype a parameter had before (`dtypes`) the one that it has now."""
    for param, dtype in dtypes.items():
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype == dtype and value.shape == param.shape:
                optimizer.state[param][name] = value.to(param.dtype)


def publish(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Copy each master (second) into its working parameter (first), rounding to the parameter's dtype."""
    working, masters = zip(*pairs, strict=True)
    with torch.no_grad():
        torch_private.foreach_copy_(working, masters)


@torch.no_grad()
def current_value(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """The master, or a copy of it with those elements of `param` that are not its rounded ones: others wrote them."""
    changed = param != master.to(param.dtype)
    return torch.where(changed, param.float(), master) if bool(changed.any()) else master.detach()


def by_bytes(shards: Sequence[ParamShard], limit: float) -> list[list[ParamShard]]:
    """Consecutive groups of shards whose fp32 gradients take at most `limit` bytes (one larger shard stands alone)."""
    buckets: list[list[ParamShard]] = []
    room = 0.0
    for shard in shards:
        size = shard.param.numel() * 4
        if size > room or not buckets:
            buckets.append([])
            room = limit
        buckets[-1].append(shard)
        room -= size
    return buckets


def _to_dtype_of(new: torch.Tensor, old: torch.Tensor, value: object) -> object:
    """State that had the old parameter's dtype gets the new one's."""
    alike = isinstance(value, torch.Tensor) and value.dtype == old.dtype and value.shape == old.shape
    return value.to(new.dtype) if isinstance(value, torch.Tensor) and alike else value
