"""Which class a module is of, as plans and partitioners ask."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


def comes_from(module: nn.Module, kinds: Collection[type[nn.Module] | str]) -> bool:
    """Whether the class that `module` has its `forward` from is one of `kinds`: classes, or their full names."""
    origin = next((kind for kind in type(module).__mro__ if "forward" in vars(kind)), nn.Module)
    return origin in kinds or f"{origin.__module__}.{origin.__qualname__}" in kinds
