"""Applies torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

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


def add_missing_grads(unit: FSDPModule) -> None:
    """Before the last of several backwards: where FSDP2 holds gradients of `unit` in a wider dtype than its parameters
    have, let it hold zeros of that dtype for the parameters that had none.

    torch 2.13 and 2.14 make these zeros in the parameters' dtype, and then refuse the mixture. Older torch makes none;
    newer torch, where the gradient is a property, makes them right.
    """
    groups: Any = getattr(unit._get_fsdp_state(), "_fsdp_param_groups", ())
    params = [param for group in groups for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    if hasattr(FSDPParam, "unsharded_accumulated_grad") or all(p.unsharded_accumulated_grad is None for p in params):
        return
    for param in params:
        if param.unsharded_accumulated_grad is None and param._unsharded_param.requires_grad:
            param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype)


def prefetch(units: Sequence[FSDPModule], count: int) -> None:
    """Have each unit gather the weights of the next `count` with its own. (FSDP2 does so for 1 by itself.)"""
    if count == 1:
        return
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + count]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, place - count) : place])))
