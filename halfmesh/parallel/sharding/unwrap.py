"""Takes `fully_shard` back, for which torch has no function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule

_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Origin:
    """What a model is before `fully_shard`, but for its parameters' values; and how it becomes that again."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {module: (type(module), set(vars(module))) for module in model.modules()}
        self._dtypes: dict[torch.Tensor, torch.dtype] = {}

    def cast_buffers(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Cast floating-point buffers of `model` to `dtype`."""
        for buffer in model.buffers():
            if buffer.is_floating_point() and buffer.dtype != dtype:
                self._dtypes[buffer] = buffer.dtype
                buffer.data = buffer.data.to(dtype)

    def restore_buffers(self) -> None:
        """Give buffers that were cast their dtypes back."""
        for buffer, dtype in self._dtypes.items():
            buffer.data = buffer.data.to(dtype)

    def unwrap(self) -> None:
        """Give modules back the class and the attributes that they had, and take away FSDP2's hooks."""
        for module, (kind, attributes) in self._modules.items():
            if isinstance(module, FSDPModule):
                module.__class__ = kind  # type: ignore[assignment]
                _composable_state._module_state_mapping.pop(module, None)  # or a second fully_shard is refused
            tables = [table for name, table in vars(module).items() if name.endswith("_hooks")]
            for hooks in [table for table in tables if isinstance(table, dict)]:  # transformers keeps a list of its own
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
