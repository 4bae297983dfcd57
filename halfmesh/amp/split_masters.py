"""Stores fp32 masters in 16 bits each: bf16 weights hold the upper half, an int16 remainder the lower half."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..utils.param_shard import ParamShard
from ..utils.tensors import dtype_name, in_memory_order
from ..utils.torch_private import WriteStamp, foreach_copy_, versions
from .master_weights import MasterWeights

_NO_MEMORY = torch.UntypedStorage(0)


def split_(masters: torch.Tensor) -> torch.Tensor:
    """Round fp32 `masters` in place to what bf16 can hold, and return the int16 remainders.

    Their bits are (bits of the bf16 weight << 16) + remainder: the weight is the nearest one, and of two equally near
    the one that is further from 0, because a remainder of +2**15 does not fit. nan stays nan, with other bits.
    """
    bits, is_nan = masters.view(torch.int32), masters.isnan()
    remainders = bits.to(torch.int16)  # the lower bits
    bits.sub_(remainders)
    masters.masked_fill_(is_nan, nan)  # the carry may have made it 0 or inf
    return remainders


def join_(weights: torch.Tensor, remainders: torch.Tensor) -> None:
    """Turn `weights`, in fp32, into the masters that `split_` made them and `remainders` from.

    A weight of 0 is 0: it may have been written since, as by a mask, and with the remainder of another number its bits
    may be a nan. So masters below 2**-134 are lost.
    """
    weights.view(torch.int32).add_(remainders.masked_fill(weights == 0, 0))


@dataclass(frozen=True, eq=False)
class _Memory:
    """The memory of some masters that are joined, on one device.

    Attributes:
        params: the model's parameters that they are of.
        flat: all of them.
        views: each of them, in `flat`.
    """

    params: list[nn.Parameter]
    flat: torch.Tensor
    views: list[torch.Tensor]


class SplitMasters(MasterWeights):
    """`MasterWeights` of bf16 parameters that have memory only while they are `joined`: 2 bytes each instead of 4.

    Between updates a master, in the optimizer's groups, is a stand-in of the same shape, dtype and device: it reads as
    nan, and torch refuses writes into it. What user code writes into the model is in the masters at once, as their
    upper halves.

    Attributes:
        remainders: parameter of the model -> the lower halves of its master.

    Raises:
        InputError: a parameter with a master is not in bf16.
    """

    def __init__(self, *args: Any) -> None:
        self.remainders: dict[nn.Parameter, torch.Tensor] = {}
        self._shards: dict[torch.Tensor, ParamShard] = {}  # by master
        self._joined: list[_Memory] = []
        self._stand_ins: dict[torch.device, torch.Tensor] = {}
        super().__init__(*args)

    def sync(self) -> None:
        super().sync()
        new = [shard for shard in self.with_master if shard.param not in self.remainders]
        for shard in new:
            param = shard.param
            if param.dtype != torch.bfloat16:
                raise InputError(
                    f"masters='split': {shard.name!r} stays in {dtype_name(param.dtype)}, but only bfloat16 is the "
                    "upper half of an fp32 number; build the model in fp32 or bf16, or use masters='float32'"
                )
            master = self.masters[param]
            weight = master.detach().clone()
            self.remainders[param] = split_(weight)
            param.data.copy_(weight)  # `.data`: not counted, as a forward may be waiting for its backward
            self._shards[master], self.layouts[master] = shard, self.remainders[param]
            self._release([param])
        if new:
            self.mark_published(new)

    def _stamps(self, tensors: Sequence[torch.Tensor]) -> list[WriteStamp]:
        """Of a master without the memory that it has here, which comes and goes."""
        here = self._memory()
        storages = [_NO_MEMORY if tensor.untyped_storage() in here else tensor.untyped_storage() for tensor in tensors]
        return list(zip(versions(tensors), storages, strict=True))

    def _memory(self) -> list[torch.UntypedStorage]:
        """Of stand-ins, and of masters that are joined."""
        joined = [memory.flat for memory in self._joined]
        return [tensor.untyped_storage() for tensor in (*self._stand_ins.values(), *joined)]

    # -- memory ------------------------------------------------------------------------------------------------

    @contextmanager
    def joined(self, shards: Iterable[ParamShard] | None = None, writes: bool = True) -> Iterator[None]:
        held = {param for memory in self._joined for param in memory.params}
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for shard in self.with_master if shards is None else shards:
            if shard.param in self.masters and shard.param not in held:
                by_device.setdefault(shard.param.device, []).append(shard.param)
        mine = [self._join(params) for params in by_device.values()]
        for memory in mine:
            for param, view in zip(memory.params, memory.views, strict=True):
                self.masters[param].data = view
        self._joined += mine
        try:
            yield
        finally:
            for memory in mine:
                if memory in self._joined:  # else published
                    self._joined.remove(memory)
                    self._split(memory) if writes else self._release(memory.params)

    def publish(self, shards: Iterable[ParamShard]) -> None:
        """Split all masters that are joined; `mark_published` follows."""
        while self._joined:
            self._split(self._joined.pop())

    @torch.no_grad()
    def _join(self, params: list[nn.Parameter]) -> _Memory:
        """Memory for the masters of `params`, each with the strides of its remainders, in the same order. (Those of the
        parameter may change: `model.to(memory_format=...)`.)"""
        sizes = [param.numel() for param in params]
        flat = torch.empty(sum(sizes), device=params[0].device)
        pairs = zip(flat.split(sizes), params, strict=True)
        views = [part.as_strided(param.shape, self.remainders[param].stride()) for part, param in pairs]
        foreach_copy_(views, params)
        join_(flat, torch.cat(self._flat_remainders(params)))
        return _Memory(params, flat, views)

    @torch.no_grad()
    def _split(self, memory: _Memory) -> None:
        """Write masters into weights and remainders, and free them."""
        for param, view in zip(memory.params, memory.views, strict=True):
            master = self.masters[param].detach()
            if master.untyped_storage() is not memory.flat.untyped_storage():  # the optimizer has set `master.data`
                view.copy_(master)
        remainders = split_(memory.flat).split([param.numel() for param in memory.params])
        foreach_copy_(self._flat_remainders(memory.params), remainders)
        foreach_copy_(memory.params, memory.views)
        self._release(memory.params)

    def _release(self, params: Sequence[nn.Parameter]) -> None:
        """Free the masters of `params`, of one device."""
        device = params[0].device
        stand_in = self._stand_ins.setdefault(device, torch.full((), nan, device=device))
        for param in params:
            self.masters[param].data = stand_in.expand(param.shape)

    def _flat_remainders(self, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        return [in_memory_order(self.remainders[param]) for param in params]

    # -- values ------------------------------------------------------------------------------------------------

    def held(self, target: torch.Tensor) -> list[torch.Tensor]:
        shard = self._shards.get(target)
        return super().held(target) if shard is None else [shard.param.detach(), self.remainders[shard.param]]

    def reject_split(self, call: str) -> None:
        if self.masters:  # under fsdp the shards are the masters
            raise InputError(
                f"{call}: masters='split' has no fp32 masters between updates; use model.state_dict() and the model's "
                "parameters, or masters='float32'"
            )

    @property
    def kept(self) -> list[torch.Tensor]:
        return list(self.remainders.values())

    def full_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        master = self.masters.get(tensor)  # type: ignore[call-overload]  # a buffer has none
        return super().full_value(tensor) if master is None else self.value(self._shards[master])

    def by_name(self) -> dict[str, torch.Tensor]:
        return {shard.name: self.value(shard) for shard in self.with_master}

    def adopt(self, changed: Container[torch.Tensor]) -> list[str]:
        if any(master in changed for master in self.layouts):
            here = self._memory()
            moved = [s.param for master, s in self._shards.items() if master.untyped_storage() not in here]
            filled = [stand_in for stand_in in self._stand_ins.values() if not stand_in.isnan()]
            for param in moved:  # by `master.data = ...`
                self._release([param])
            for stand_in in filled:  # by `fill_`, which torch does not reject
                stand_in.fill_(nan)
            if moved or filled:
                self.reject_split("a write into parameters of the optimizer")
        return []  # the weights are the masters' upper halves

    def uncounted(self) -> list[str]:
        return []

    def set_master(self, shard: ParamShard, value: torch.Tensor) -> torch.Tensor:
        weight = torch.empty_like(shard.model_param, dtype=torch.float32).copy_(value)
        remainders = split_(weight)
        self.remainders[shard.param].copy_(shard.part_of(remainders))
        return weight
