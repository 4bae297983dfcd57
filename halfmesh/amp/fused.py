"""torch's fused optimizers: which of them take the loss scale and the verdict along, and their traps."""

from __future__ import annotations

from typing import Any

import torch
from torch import optim

from ..strides import is_dense

# These read `grad_scale` and `found_inf` from the optimizer when fused. Every other optimizer of torch would ignore
# the two attributes and step with the gradients as they are, so the attributes are set on these alone. Exact types:
# a subclass may have a step of its own.
_TAKES_SCALE = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)

DECISIVE = ("fused", "foreach", "momentum", "dampening", "differentiable")
"""Settings of a parameter group that decide which implementation is right for it."""


def switch_to_fused(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Set `fused` in the groups where the user left the choice to torch and fused is exact; returns those groups."""
    switched: list[dict[str, Any]] = []
    if type(optimizer) not in _TAKES_SCALE or not _kernel_works(optimizer):
        return switched
    for group in optimizer.param_groups:
        if group.get("fused") is None and group.get("foreach") is None and _exact(group, optimizer):
            group["fused"], group["foreach"] = True, False
            switched.append(group)
    _move_step_counters(optimizer)
    return switched


def switch_back(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Leave the choice to torch again in `groups`."""
    for group in groups:
        group["fused"] = group["foreach"] = None


def takes_scale(optimizer: optim.Optimizer) -> bool:
    """Whether `step` divides by `grad_scale` and obeys `found_inf` in every group."""
    return type(optimizer) in _TAKES_SCALE and all(
        group.get("fused") and _exact(group, optimizer) for group in optimizer.param_groups
    )


def seed_momentum(optimizer: optim.Optimizer) -> None:
    """Give fused SGD zeroed momentum buffers before the first step.

    torch leaves them uninitialised when the first step is skipped, and uses them in the next. Zeros are exact when
    `dampening` is 0.
    """
    if type(optimizer) is not optim.SGD:
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"] != 0:
            for param in group["params"]:
                if optimizer.state[param].get("momentum_buffer") is None:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _exact(group: dict[str, Any], optimizer: optim.Optimizer) -> bool:
    """Whether the fused kernel does the same as the plain one for this group."""
    dampened = group.get("momentum", 0) != 0 and group.get("dampening", 0) != 0  # the first step is special then
    kinds = {(p.device, p.dtype) for p in group["params"]}
    floating = all(dtype.is_floating_point for _, dtype in kinds)
    laid_out = all(_laid_out_alike(p, optimizer.state.get(p, {})) for p in group["params"])
    return not dampened and not group.get("differentiable") and floating and len(kinds) <= 1 and laid_out


def _laid_out_alike(param: torch.Tensor, state: dict[str, Any]) -> bool:
    """The CPU's fused kernels walk through memory without looking at strides."""
    values = [v for v in state.values() if isinstance(v, torch.Tensor) and v.shape == param.shape and v.dim() > 0]
    return is_dense(param) and all(value.stride() == param.stride() for value in values)


def _kernel_works(optimizer: optim.Optimizer) -> bool:
    """Try the fused kernel on one element of each device: support differs between torch versions and devices."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    for device in devices:
        param = torch.nn.Parameter(torch.ones(1, device=device))
        param.grad = torch.ones(1, device=device)
        try:
            probe = type(optimizer)([param], lr=1.0, fused=True)  # type: ignore[call-arg]
            probe.grad_scale = torch.ones((), device=device)  # type: ignore[attr-defined]
            probe.found_inf = torch.ones((), device=device)  # type: ignore[attr-defined]
            probe.step()
        except (RuntimeError, TypeError, AssertionError, NotImplementedError):
            return False
    return True


def _move_step_counters(optimizer: optim.Optimizer) -> None:
    """A fused step counter lives beside its parameter; that of an optimizer that has already stepped is on the CPU."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for param in group["params"]:
                step = optimizer.state[param].get("step") if param in optimizer.state else None
                if isinstance(step, torch.Tensor):
                    optimizer.state[param]["step"] = step.to(param.device, torch.float32)
