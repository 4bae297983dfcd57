"""Applies torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from ..reducer import ReduceOptions
from .units import ShardOptions


def wrap(
    unit: nn.Module,
    mesh: DeviceMesh,
    options: ShardOptions,
    reduce: ReduceOptions,
    kept: set[nn.Parameter],
    is_root: bool,
) -> FSDPModule:
    """Shard the parameters of `unit`, in place, but for those that other units within have, and those that are `kept`.

    Args:
        is_root: whether it is the model.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=options.param_dtype,
        reduce_dtype=reduce.dtype,
        output_dtype=options.output_dtype if is_root else None,
        cast_forward_inputs=options.cast_inputs,
    )
    is_pinned = mesh.device_type == "cuda"
    sharded = fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=options.reshard_after_forward,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(pin_memory=is_pinned) if options.cpu_offload else OffloadPolicy(),
        ignored_params=kept,
    )
    if not reduce.mean:
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # not every backend multiplies as it sums
    if hasattr(sharded, "set_reduce_scatter_unused_params"):  # since torch 2.13
        sharded.set_reduce_scatter_unused_params(True)  # a rank may not use what another does
    return sharded


def prefetch(units: Sequence[FSDPModule], count: int) -> None:
    """Have each unit gather the weights of the next `count` with its own. (FSDP2 does so for 1 by itself.)"""
    if count == 1:
        return
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + count]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, place - count) : place])))
