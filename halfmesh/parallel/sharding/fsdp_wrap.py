"""Chooses the units in which FSDP gathers a model, gathers their weights in float8, and detects writes into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from ...utils.param_shard import ParamShard
from ...utils.torch_private import grad_hooks, reduce_scatter, with_memory
from ..mesh import ParallelContext

Slot = tuple[nn.Module, str]
"""A module, and the name of a parameter there."""


def find_units(
    model: nn.Module, blocks: Sequence[str], separate: Set[nn.Parameter], not_called: Collection[str] | None
) -> list[nn.Module]:
    """The modules that gather their weights separately, inner ones first.

    Args:
        blocks: names of the repeated blocks; a rank may not have all of them.
        separate: parameters that are sharded over other ranks than the rest, as those of experts.
        not_called: under a pipeline, names of the modules that stages do not call directly, with the model itself. All
            other modules with parameters are units then. None: the model is the unit of the rest.
    """
    known, within = dict(model.named_modules()), set[nn.Module]()
    units = list[nn.Module]()
    for module in model.modules() if separate else ():  # outer ones first
        if module not in within and (held := {*module.parameters()}) and held <= separate:
            units.append(module)
            within.update(module.modules())
    units += [known[name] for name in blocks if name in known and name not in (not_called or ())]
    if not_called is None:
        return [*units, model]
    within = {inner for unit in units for inner in unit.modules()}
    rest = [module for name, module in known.items() if module not in within and name not in not_called]
    return units + [module for module in rest if next(module.parameters(recurse=False), None) is not None]


def unowned_params(model: nn.Module, units: Sequence[nn.Module]) -> set[nn.Parameter]:
    """The parameters that belong to no unit: of modules that are not called, or shared by several units."""
    seen: Counter[nn.Parameter] = Counter()
    taken: set[nn.Module] = set()
    for unit in units:
        own = {inner for inner in unit.modules() if inner not in taken}
        taken |= own
        seen.update({param for inner in own for param in inner.parameters(recurse=False)})
    return {param for param in model.parameters() if seen[param] != 1}


def first_row(weight: Any) -> int:
    """The row at which this rank's shard of a DTensor begins."""
    mesh, rows = weight.device_mesh, len(weight)
    return min(mesh.get_local_rank(mesh.ndim - 1) * -(-rows // mesh.size(-1)), rows)


@with_memory()  # a mesh reads its table of ranks
def make_mesh(context: ParallelContext, axes: Sequence[str], hybrid: int | None) -> DeviceMesh:
    """The mesh for FSDP2 of the ranks of `axes`: one dim, or two with `hybrid` ranks to a copy. All ranks together."""
    kind, group, size = context.device.type, context.group(*axes), context.size_of(*axes)
    # DTensors look groups up by a mesh that compares equal, which may be that of an earlier engine. So each has
    # another name.
    if hybrid is None or hybrid == size:
        return DeviceMesh.from_group(group, kind, mesh_dim_names=(f"shard_{group.group_name}",))
    grid = torch.arange(size).view(-1, hybrid)
    copies = [context.subgroup(column, *axes) for column in grid.T.tolist()]
    shards = [context.subgroup(row, *axes) for row in grid.tolist()]
    mine = [next(group for group in groups if group is not None) for groups in (copies, shards)]
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, hybrid)
    names = tuple(f"{dim}_{group.group_name}" for dim, group in zip(("replicate", "shard"), mine, strict=True))
    return DeviceMesh.from_group(mine, kind, mesh=ranks, mesh_dim_names=names)


class ReduceScatter:
    """FSDP2's reduce-scatter (`set_custom_reduce_scatter`) over another group of the same ranks: on NCCL collectives of
    one group run one after the other, so that a gather would wait for it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for its input or output, as FSDP2's own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return reduce_scatter(output_tensor, input_tensor, group=self._group, op=op, async_op=async_op)


def add_missing_grads(unit: FSDPModule) -> None:
    """Before the last of several backwards: if FSDP2 has accumulated gradients of `unit` in a wider dtype than its
    parameters', give parameters without a gradient zeros of that dtype.

    torch 2.13 and 2.14 create these zeros in the parameters' dtype, and then reject the mixture. Older torch creates
    none; newer torch, where the gradient is a property, uses the right dtype.
    """
    groups: Any = getattr(unit._get_fsdp_state(), "_fsdp_param_groups", ())
    params = [param for group in groups for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    if hasattr(FSDPParam, "unsharded_accumulated_grad") or all(p.unsharded_accumulated_grad is None for p in params):
        return
    for param in params:
        if param.unsharded_accumulated_grad is None and param._unsharded_param.requires_grad:
            param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype)


def prefetch(units: Sequence[FSDPModule], count: int) -> None:
    """Make each unit prefetch the weights of the next `count` units. (FSDP2 prefetches 1 by default.)"""
    if count == 1:
        return
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + count]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - count) : index])))


@torch.compiler.disable
def drop_casts(*_: Any) -> None:
    """A hook of each unit: autocast keeps its casts of weights until the whole forward ends, when they would be of the
    whole model."""
    torch.clear_autocast_cache()


def watch_grads(units: Sequence[Any], slots: Mapping[Slot, ParamShard], used: set[int]) -> None:
    """Add the id of a shard to `used` when its parameter gets a gradient on this rank. (FSDP2 gives zeros to the
    others.)

    The hooks are on FSDP2's gathered parameters, so all ranks call this together.

    Args:
        slots: the shards of this rank, by the parameters' modules and names.
    """

    def note(shard: int, _: torch.Tensor) -> None:
        used.add(shard)  # and holds nothing else: Python's garbage collector does not see a cycle through a hook

    for unit in units:
        unit.unshard()
        for module in unit.modules():
            for name, param in module.named_parameters(recurse=False):
                shard = slots.get((module, name))
                if shard is None or isinstance(param, DTensor) or grad_hooks(param):
                    continue
                trained = param.requires_grad
                param.requires_grad_(True)  # also for those that are unfrozen later
                param.register_post_accumulate_grad_hook(partial(note, id(shard)))
                param.requires_grad_(trained)
        unit.reshard()


class CastGather:
    """Casts weights before FSDP2 gathers them. Their scales come from one all-reduce, at the first gather after
    `is_stale` was set; FSDP2 gathers in the same order each time, and on all ranks.

    FSDP2 calls a shard's `fsdp_pre_all_gather` for the tensor to send, and its `fsdp_post_all_gather` for the parameter
    that the model computes with. They are attributes here: optimizers and checkpoints would also see a subclass of
    torch.Tensor.

    Args:
        weights: DTensors of one mesh, of which every rank holds the same number of rows.
        casts: one for each, see `StrategyInputs`.

    Attributes:
        is_stale: the weights may have changed. A write of the user cannot be detected, so each forward sets this; under
            a pipeline each batch.
    """

    def __init__(self, weights: Sequence[Any], casts: Sequence[Any]) -> None:
        self.count = len(weights)
        self._weights = weights
        self._casts = casts
        self._scales: list[Any] = [None] * len(weights)
        self._largest = torch.empty(0)
        self.attach()

    def attach(self) -> None:
        """Before a forward. Set the shards' attributes: again after `model.to(device)`, even to the same one, which
        replaces them."""
        self.is_stale = True
        for index, weight in enumerate(self._weights):
            shard = weight._local_tensor
            if not hasattr(shard, "fsdp_pre_all_gather"):
                shard.fsdp_pre_all_gather = partial(self._pack, index)
                shard.fsdp_post_all_gather = partial(self._unpack, index)

    def _pack(
        self, index: int, mesh: DeviceMesh, size: Any, stride: Any, module: Any, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[torch.Tensor], None]:
        shards = [weight._local_tensor for weight in self._weights]
        dtype = policy.param_dtype or shards[index].dtype
        if self.is_stale:
            self.is_stale = False
            self._largest = torch.stack([torch.linalg.vector_norm(shard, torch.inf) for shard in shards])
            dist.all_reduce(self._largest, dist.ReduceOp.MAX, mesh.get_group())
        data, scale = self._casts[index].pack(shards[index].to(dtype), self._largest[index].to(dtype))
        if self._scales[index] is None:
            self._scales[index] = scale
        else:
            # .data, which counts no write: backward would reject the tensor. FSDP2 also writes this way.
            self._scales[index].data.copy_(scale)
        return (data,), None

    def _unpack(
        self, index: int, gathered: tuple[torch.Tensor], _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        if out is None:  # later FSDP2 writes into the same memory
            return self._casts[index].unpack(*gathered, self._scales[index], dtype), gathered
        return None


class WriteWatch:
    """Detects writes into gathered weights, which FSDP2 frees: they never reach its shards. After each forward in
    training it compares the rows that this rank shards with its shard.

    Attributes:
        slots: the shards of this rank, by the parameters' modules and names.
    """

    def __init__(self) -> None:
        self._is_on = True
        self.slots: Mapping[Slot, ParamShard] = {}
        self._found: list[tuple[str, torch.Tensor]] = []

    @torch.compiler.disable
    def after_forward(self, unit: nn.Module, *_: Any) -> None:
        """A hook of each unit."""
        if not (self._is_on and unit.training and torch.is_grad_enabled()):
            return
        inner = set(unit.modules())
        for (module, name), shard in self.slots.items():
            if module in inner and type(param := getattr(module, name).detach()) is torch.Tensor:  # gathered
                start = first_row(shard.source and shard.source.param)
                own = shard.param.detach().to(param)
                is_other = param[start : start + len(own)] != own
                self._found.append((shard.name, (is_other & ~own.isnan()).any()))

    def take(self, watch: bool) -> Collection[str]:
        """The names of the parameters that were written since the last call. Reads the device.

        Args:
            watch: compare from now on.
        """
        self._is_on, found, self._found = watch, self._found, []
        flags = torch.stack([flag for _, flag in found]).tolist() if found else ()
        return sorted({name for (name, _), is_other in zip(found, flags, strict=True) if is_other})
