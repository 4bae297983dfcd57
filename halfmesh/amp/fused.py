"""torch's fused optimizers: where they may be used, and which unscale gradients and skip steps themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import optim

from ..utils.tensors import is_dense
from .recipe import HALF

# When fused, these read the attributes `grad_scale` and `found_inf` of the optimizer. Every other optimizer of torch
# ignores them, and a subclass may override `step`: exact types only.
_TAKES_GRAD_SCALE = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)

# These update each parameter from its own gradient and state alone, so a step may be taken in buckets.
_ELEMENTWISE = (
    *_TAKES_GRAD_SCALE,
    optim.RMSprop,
    optim.Adadelta,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.ASGD,
    optim.Rprop,
)

_SETTINGS = ("fused", "foreach", "momentum", "dampening", "differentiable")


def group_settings(optimizer: optim.Optimizer) -> list[Any]:
    """The settings that the choice of an implementation depends on: call `switch_to_fused` again when they change."""
    settings: list[Any] = [vars(optimizer).get("step")]
    for group in optimizer.param_groups:
        params = group["params"]
        settings += [*map(id, params), *map(torch.Tensor.stride, params), *map(bool, map(group.get, _SETTINGS))]
    return settings


def switch_to_fused(optimizer: optim.Optimizer) -> set[int]:
    """Set `fused` in the groups where the user left the choice to torch and fused is exact; return their indices."""
    switched: set[int] = set()
    for index, group in enumerate(optimizer.param_groups if _is_known(optimizer) else ()):
        left_open = group.get("fused") is None and group.get("foreach") is None
        # In half precision the kernel rounds once where the plain optimizer rounds after each operation.
        half = any(param.dtype in HALF for param in group["params"])
        if left_open and not half and _is_exact(group, optimizer):
            group["fused"], group["foreach"] = True, False
            switched.add(index)
    return switched


def switch_back(optimizer: optim.Optimizer, switched: set[int]) -> None:
    """Return the choice to torch in these groups, unless someone else has made it."""
    for index, group in enumerate(optimizer.param_groups):  # loading a state replaces the groups
        if index in switched and group["fused"] is True and group["foreach"] is False:
            group["fused"] = group["foreach"] = None


def takes_grad_scale(optimizer: optim.Optimizer) -> bool:
    """Return True if `step` divides by `grad_scale` and obeys `found_inf` in every group."""
    return _is_known(optimizer) and all(
        group.get("fused") and _is_exact(group, optimizer) for group in optimizer.param_groups
    )


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return True if several calls of `step`, each with some of the gradients, do the same as one call with all."""
    return type(optimizer) in _ELEMENTWISE and _has_own_step(optimizer)


def seed_momentum(optimizer: optim.Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Give `params` a momentum of zeros where fused SGD steps them for the first time.

    torch leaves it uninitialised where that step is skipped, and uses it in the next. Zeros are exact if `dampening`
    is 0.
    """
    if type(optimizer) is optim.SGD and any(group["momentum"] != 0 for group in optimizer.param_groups):
        for param in params:
            if optimizer.state[param].get("momentum_buffer") is None:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def place_step_counters(optimizer: optim.Optimizer) -> None:
    """Move the `step` counters to the device that the implementation expects: for fused groups the parameter's, in
    fp32; the CPU where `step` reads them on the host."""
    for group in optimizer.param_groups if type(optimizer) in _TAKES_GRAD_SCALE else ():
        read = not group.get("fused") and not group.get("capturable")
        for param in group["params"]:
            step = optimizer.state[param].get("step") if param in optimizer.state else None
            if isinstance(step, torch.Tensor) and (read or group.get("fused")):
                optimizer.state[param]["step"] = step.cpu() if read else step.to(param.device, torch.float32)


def _is_known(optimizer: optim.Optimizer) -> bool:
    return type(optimizer) in _TAKES_GRAD_SCALE and _has_own_step(optimizer)


def _has_own_step(optimizer: optim.Optimizer) -> bool:
    """Return True if `optimizer.step` is its class's, below the wrappers of torch and its LR schedulers."""
    return inspect.unwrap(optimizer.step) is inspect.unwrap(type(optimizer).step)


def _is_exact(group: dict[str, Any], optimizer: optim.Optimizer) -> bool:
    """Return True if the fused kernel does the same as the plain one for this group."""
    dampened = group.get("momentum", 0) != 0 and group.get("dampening", 0) != 0  # the first step is special then
    kinds = {(p.device, p.dtype) for p in group["params"]}
    has_kernel = all(device.type in ("cpu", "cuda") and dtype.is_floating_point for device, dtype in kinds)
    laid_out = all(_laid_out_alike(p, optimizer.state.get(p, {})) for p in group["params"])
    return not dampened and not group.get("differentiable") and has_kernel and len(kinds) <= 1 and laid_out


def _laid_out_alike(param: torch.Tensor, state: dict[str, Any]) -> bool:
    """Return True if state and dense parameter have equal strides; the CPU's fused kernels ignore strides."""
    values = [v for v in state.values() if isinstance(v, torch.Tensor) and v.shape == param.shape and v.dim() > 0]
    return is_dense(param) and all(value.stride() == param.stride() for value in values)
