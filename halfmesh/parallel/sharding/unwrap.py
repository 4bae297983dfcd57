"""Takes `fully_shard` back, for which torch has no function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ... import torch_private

_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def unwrap(before: Mapping[nn.Module, tuple[type[nn.Module], set[str]]]) -> None:
    """Give modules back the class and the attributes that they had `before`, and take away FSDP2's hooks.

    Parameters are not its business.
    """
    for module, (kind, attributes) in before.items():
        if isinstance(module, FSDPModule):
            module.__class__ = kind  # type: ignore[assignment]
            torch_private.forget_composable_state(module)
        for hooks in [table for name, table in vars(module).items() if name.endswith("_hooks")]:
            for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
                del hooks[key]
                for flags in _FLAGS:
                    getattr(module, flags).pop(key, None)
        for name in set(vars(module)) - attributes:
            if "fsdp" in name or name.startswith("__composable"):
                delattr(module, name)


def _is_of_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__self__", hook)
    return any(
        str(getattr(o, "__module__", "")).startswith("torch.distributed.fsdp") for o in (hook, owner, type(owner))
    )
