"""Tensors that are made of others, such as quantised optimizer state: saved as those, and put together again.

A traceable wrapper subclass says by `__tensor_flatten__` which tensors it holds. State "exp_avg" of this kind is saved
as the tensors "exp_avg/codes" and "exp_avg/scale", and, as plain values under "exp_avg/", what makes one of them.
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
    """Yields the plain tensors in the state `key`, and puts into `made` what `put_together` needs besides."""
    if not is_compound(tensor):
        yield key, tensor.detach()
        return
    names, context = tensor.__tensor_flatten__()
    made[f"{key}/"] = class_name(tensor), list(names), context, tensor.shape, tensor.stride()
    for name in names:
        yield from take_apart(f"{key}/{name}", getattr(tensor, name), made)


def put_together(values: dict[str, Any]) -> None:
    """Make the tensors of `values`, state by key, again that were taken apart, in place. Their classes are looked up
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
