"""Tensors made of other tensors, such as quantised optimizer state: saved as the inner tensors, rebuilt when loaded.

A traceable wrapper subclass lists its inner tensors in `__tensor_flatten__`. State "exp_avg" of this kind is saved as
the tensors "exp_avg/codes" and "exp_avg/scale", and, under "exp_avg/", the plain values needed to rebuild it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, cast

import torch

from ..errors import InputError
from ..utils.tensors import is_compound
from .validate import class_name


def take_apart(key: str, tensor: Any, made: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the plain tensors in the state `key`, and puts into `made` the plain values for `put_together`."""
    if not is_compound(tensor):
        yield key, tensor.detach()
        return
    names, context = tensor.__tensor_flatten__()
    made[f"{key}/"] = class_name(tensor), list(names), context, tensor.shape, tensor.stride()
    for name in names:
        yield from take_apart(f"{key}/{name}", getattr(tensor, name), made)


def put_together(values: dict[str, Any]) -> None:
    """Rebuild the tensors of `values`, state by key, that `take_apart` split, in place. Their classes are looked up
    among those that the program has imported: a file imports nothing."""
    for key in [key for key in reversed(values) if key.endswith("/")]:  # the inner ones first
        kind, names, context, size, stride = values.pop(key)
        module, _, name = kind.rpartition(".")
        found = getattr(sys.modules.get(module), name, None)
        if not (isinstance(found, type) and issubclass(found, torch.Tensor)):
            raise InputError(
                f"the optimizer's state holds a {kind}, which this program has not imported; import it first"
            )
        inner = {name: values.pop(key + name) for name in names}
        values[key[:-1]] = cast(Any, found).__tensor_unflatten__(inner, context, size, stride)
