"""What files of amp import from here until they are rewritten."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ._torch import (
    BATCH_NORMS,
    RUNNING_STATISTICS,
    assigns,
    edit_stamp,
    foreach_copy_,
    foreach_mul_,
    has_no_memory,
    move_module,
    outside_of_dry_run,
    version,
)
from .amp._torch import foreach_norm, has_step_hooks, has_step_pre_hooks, update_scale_

__all__ = [
    "assigns",
    "edit_stamp",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "has_no_memory",
    "has_step_hooks",
    "has_step_pre_hooks",
    "move_module",
    "outside_of_dry_run",
    "update_scale_",
]

FUSED_STEPS = frozenset(
    getattr(torch, name) for name in dir(torch) if name.startswith("_fused_") and name.endswith("_")
)
set_grad_enabled = torch._C._set_grad_enabled


def edit_stamps(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return list(map(edit_stamp, tensors))


def versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if tensor is None else version(tensor) for tensor in tensors]


def has_step_post_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_post_hooks)


def is_functorch_tensor(tensor: torch.Tensor) -> bool:
    return torch.func.debug_unwrap(tensor, recurse=False) is not tensor


def is_operator(function: object) -> bool:
    return isinstance(function, (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)))


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORMS)


def keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, RUNNING_STATISTICS)
