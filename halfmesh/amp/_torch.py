"""An optimizer's hooks, which torch does not list publicly."""

from __future__ import annotations

import torch
from torch.optim import optimizer as all_optimizers
from torch.utils.hooks import RemovableHandle


def has_step_pre_hooks(optimizer: torch.optim.Optimizer, besides: RemovableHandle) -> bool:
    """Whether hooks run before `optimizer.step()`, those for all optimizers included; `besides` is not counted."""
    return bool(optimizer._optimizer_step_pre_hooks.keys() - {besides.id} or all_optimizers._global_optimizer_pre_hooks)


def has_step_hooks(optimizer: torch.optim.Optimizer, besides: RemovableHandle) -> bool:
    """Whether hooks run before or after `optimizer.step()`, as `has_step_pre_hooks` counts them."""
    after = optimizer._optimizer_step_post_hooks or all_optimizers._global_optimizer_post_hooks
    return bool(after) or has_step_pre_hooks(optimizer, besides)
