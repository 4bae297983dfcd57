"""Apply a function to every tensor of a nested batch or output."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with `fn` applied to its tensors; containers keep their type.

    Lists, tuples, named tuples, mappings (dict subclasses such as a model's output class too) and dataclass
    instances are walked. Anything else is returned as it is. Where `fn` changes nothing in a container, the
    container itself is returned, so that identity-sensitive outputs survive.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(fn, value) for key, value in tree.items()}
        return tree if _same(mapped.values(), tree.values()) else _rebuild_mapping(tree, mapped)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(fn, item) for item in tree]
        if _same(items, tree):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
        mapped = {name: map_tensors(fn, value) for name, value in fields.items()}
        if _same(mapped.values(), fields.values()):
            return tree
        rebuilt = copy.copy(tree)  # keeps what was set beside the fields
        for name, value in mapped.items():
            object.__setattr__(rebuilt, name, value)  # also where the dataclass is frozen
        return rebuilt
    return tree


def _rebuild_mapping(tree: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return mapped
    if dataclasses.is_dataclass(tree):  # a model output that is both a mapping and a dataclass
        return type(tree)(**mapped)
    if hasattr(tree, "copy") and hasattr(tree, "update"):
        rebuilt = tree.copy()  # keeps what a subclass carries beside its items, such as a default factory
        if type(rebuilt) is type(tree):
            rebuilt.update(mapped)
            return rebuilt
    return type(tree)(mapped)  # type: ignore[call-arg]


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
