"""Helpers of plans and partitioners: the class of a module, and copies without memory."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn


def comes_from(module: nn.Module, kinds: Collection[type[nn.Module] | str]) -> bool:
    """Return True if the class that `module` has its `forward` from is one of `kinds`: classes, or their full names."""
    origin = next((kind for kind in type(module).__mro__ if "forward" in vars(kind)), nn.Module)
    return origin in kinds or f"{origin.__module__}.{origin.__qualname__}" in kinds


def meta_copy(module: nn.Module, model: nn.Module) -> nn.Module:
    """A copy of `module`, one of `model`'s (or `model` itself), with parameters and buffers on the meta device.

    Frozen parameters are not frozen in the copy. Functions on modules (`self.mlp = lambda x: drop(linear(x))`) call its
    modules.

    Raises:
        Exception: any error of copy.deepcopy.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.is_floating_point())
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    new = copy.deepcopy(module, memo)
    for each in new.modules():
        own = vars(each)
        own |= {name: _rebind(value, memo) for name, value in own.items() if isinstance(value, FunctionType)}
    return new


def _rebind(function: FunctionType, copies: Mapping[int, Any]) -> FunctionType:
    """`function` with `copies`, by id, of the objects in its closure."""
    around = [cell.cell_contents for cell in function.__closure__ or ()]
    if not any(id(value) in copies for value in (*around, *(function.__defaults__ or ()))):
        return function
    closure = tuple(CellType(copies.get(id(value), value)) for value in around)
    defaults = tuple(copies.get(id(value), value) for value in function.__defaults__ or ())
    new = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    return new
