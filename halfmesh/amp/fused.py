"""torch's fused optimizers: which of them take the loss scale and the verdict along, and their traps."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import optim

from .. import torch_private
from ..errors import InputError
from ..own_steps import is_of_torch, step_of
from ..tensors import is_dense
from .recipe import HALF

# These read `grad_scale` and `found_inf` from the optimizer when fused. Every other optimizer of torch would ignore
# the two attributes and step with the gradients as they are, so the attributes are set on these alone. Exact types,
# and torch's `step`: a subclass may have a step of its own, and so may an object.
_TAKES_SCALE = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)

DECISIVE = ("fused", "foreach", "momentum", "dampening", "differentiable")
"""Settings of a parameter group that decide which implementation is right for it."""


def switch_to_fused(optimizer: optim.Optimizer) -> set[int]:
    """Set `fused` in the groups where the user left the choice to torch and fused is exact; returns their places."""
    switched: set[int] = set()
    if not _is_known(optimizer) or not _kernel_works(optimizer):
        return switched
    for index, group in enumerate(optimizer.param_groups):
        left_open = group.get("fused") is None and group.get("foreach") is None
        # In half precision the kernel rounds once where the plain optimizer rounds after each operation.
        half = any(param.dtype in HALF for param in group["params"])
        if left_open and not half and _exact(group, optimizer):
            group["fused"], group["foreach"] = True, False
            switched.add(index)
    return switched


def switch_back(optimizer: optim.Optimizer, switched: set[int]) -> None:
    """Leave the choice to torch again in the groups at these places, unless somebody else has made it."""
    for index, group in enumerate(optimizer.param_groups):  # loading a state makes new ones in their places
        if index in switched and group["fused"] is True and group["foreach"] is False:
            group["fused"] = group["foreach"] = None


def takes_scale(optimizer: optim.Optimizer) -> bool:
    """Whether `step` divides by `grad_scale` and obeys `found_inf` in every group."""
    return _is_known(optimizer) and all(
        group.get("fused") and _exact(group, optimizer) for group in optimizer.param_groups
    )


def _is_known(optimizer: optim.Optimizer) -> bool:
    return type(optimizer) in _TAKES_SCALE and is_of_torch(step_of(optimizer))


def seed_momentum(optimizer: optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Give fused SGD zeroed momentum buffers before the first step; returns those, by parameter.

    torch leaves them uninitialised when the first step is skipped, and uses them in the next. Zeros are exact when
    `dampening` is 0.
    """
    seeded: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups if type(optimizer) is optim.SGD else ():
        if group.get("fused") and group["momentum"] != 0:
            for param in group["params"]:
                if optimizer.state[param].get("momentum_buffer") is None:
                    seeded[param] = optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    return seeded


def take_back_momentum(optimizer: optim.Optimizer, seeded: dict[torch.Tensor, torch.Tensor]) -> None:
    """Where `seed_momentum` gave buffers that no update has used, the optimizer has none again."""
    for param, buffer in seeded.items():
        state = optimizer.state.get(param, {})
        if state.get("momentum_buffer") is buffer:
            del state["momentum_buffer"]
            if not state:
                del optimizer.state[param]
    seeded.clear()


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


def refuse_broken(optimizer: optim.Optimizer) -> None:
    """Raise InputError if the user chose a fused kernel that gives wrong results here."""
    chosen = type(optimizer) in _TAKES_SCALE and any(group.get("fused") for group in optimizer.param_groups)
    if chosen and not _kernel_works(optimizer):
        kinds = ", ".join(sorted({f"{p.dtype} on {p.device}" for g in optimizer.param_groups for p in g["params"]}))
        raise InputError(
            f"{type(optimizer).__name__}(fused=True) does not work for parameters of {kinds} in torch "
            f"{torch.__version__}; leave fused out"
        )


def _kernel_works(optimizer: optim.Optimizer) -> bool:
    """Try the fused kernel on each device and dtype against the plain one.

    Support differs between torch versions and devices, and not every lack of it is an error: up to torch 2.13 the
    CPU's fused SGD without momentum leaves half-precision parameters of 16 elements and more as they are.
    """
    kinds = {(p.device, p.dtype) for group in optimizer.param_groups for p in group["params"]}
    settings: list[dict[str, Any]] = [{}, {"momentum": 0.9}] if type(optimizer) is optim.SGD else [{}]
    try:
        with torch_private.outside_of_dry_run():
            kernel: Any = type(optimizer)
            return all(_equals_plain(kernel, *kind, **setting) for kind in kinds for setting in settings)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError):
        return False


@functools.cache
def _equals_plain(kind: type[optim.Optimizer], device: torch.device, dtype: torch.dtype, **settings: Any) -> bool:
    """A fused step of gradient 2 with scale 2 is a plain one of gradient 1; one with inf found does nothing."""
    size = 67  # some vectors of any width, and a rest
    fused, plain = (torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype)) for _ in range(2))
    fused_optimizer = kind([fused], lr=1.0, fused=True, **settings)  # type: ignore[call-arg]
    plain_optimizer = kind([plain], lr=1.0, fused=False, **settings)  # type: ignore[call-arg]
    seed_momentum(fused_optimizer)
    for found_inf in (1.0, 0.0):
        grad = fused.grad = torch.full_like(fused, 2.0)
        fused_optimizer.grad_scale = torch.full((), 2.0, device=device)  # type: ignore[attr-defined]
        fused_optimizer.found_inf = torch.full((), found_inf, device=device)  # type: ignore[attr-defined]
        fused_optimizer.step()
        if found_inf and not bool(torch.all(fused == 1)):
            return False
    plain.grad = torch.ones_like(plain)
    plain_optimizer.step()
    unscaled = bool((grad == 1).all())  # in place
    return unscaled and torch.allclose(fused, plain, atol=1e-2)


def place_step_counters(optimizer: optim.Optimizer) -> None:
    """Those of fused groups beside their parameters, as fp32; those that the host reads at each step on the CPU."""
    if type(optimizer) not in _TAKES_SCALE:
        return
    for group in optimizer.param_groups:
        read = not group.get("fused") and not group.get("capturable")
        for param in group["params"]:
            step = optimizer.state[param].get("step") if param in optimizer.state else None
            if isinstance(step, torch.Tensor) and (read or group.get("fused")):
                optimizer.state[param]["step"] = step.cpu() if read else step.to(param.device, torch.float32)
