"""Tensors in nested containers, and how a tensor's elements lie in memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def map_tensors(fn: Callable[[Any], Any], tree: Any, kind: type = torch.Tensor) -> Any:
    """`tree` with `fn` applied to its tensors (or leaves of another `kind`); containers keep their type.

    Walks lists, tuples, named tuples, mappings (also dict subclasses such as a model's output class) and dataclass
    instances; returns anything else as it is. A container in which `fn` changes nothing is itself returned, so that
    code that compares outputs by identity still works.
    """
    if isinstance(tree, kind):
        return fn(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(fn, value, kind) for key, value in tree.items()}
        return tree if _same(mapped.values(), tree.values()) else _rebuild_mapping(tree, mapped)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(fn, item, kind) for item in tree]
        if _same(items, tree):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
        mapped = {name: map_tensors(fn, value, kind) for name, value in fields.items()}
        if _same(mapped.values(), fields.values()):
            return tree
        rebuilt = copy.copy(tree)  # keeps attributes that are not fields
        for name, value in mapped.items():
            object.__setattr__(rebuilt, name, value)  # works on a frozen dataclass, too
        return rebuilt
    return tree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of `tree`, in the order in which `map_tensors` visits them."""
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, tree)  # type: ignore[func-returns-value]
    return found


def _rebuild_mapping(tree: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return mapped
    if dataclasses.is_dataclass(tree):  # a model output that is both a mapping and a dataclass
        return type(tree)(**mapped)
    if hasattr(tree, "copy") and hasattr(tree, "update"):
        rebuilt = tree.copy()  # keeps what a subclass has besides its items, such as a default factory
        if type(rebuilt) is type(tree):
            rebuilt.update(mapped)
            return rebuilt
    return type(tree)(mapped)  # type: ignore[call-arg]


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order of the dims (channels_last is)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as one contiguous dim, in the order in which they lie in memory. A view; a copy if not dense."""
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1).contiguous()


def replace_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, also where one of the two is on the meta device, for which torch refuses that.

    Raises:
        RuntimeError: one of the two is on the meta device, and something holds a weak reference to `tensor`.
    """
    if tensor.is_meta == value.is_meta:
        tensor.data = value
        return
    new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.view(value.shape)
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)
