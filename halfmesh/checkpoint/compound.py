"""Tensors that are made of others, such as quantised optimizer state: saved as those, and put together again.

A traceable wrapper subclass says by `__tensor_flatten__` which tensors it holds. State "exp_avg" of this kind is saved
as the tensors "exp_avg/codes" and "exp_avg/scale", and, as plain values under "exp_avg/", what makes one of them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InputError
from ..tensors import is_compound
from .validate import class_name


def take_apart(key: str, tensor: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The plain tensors in the state `key`, and the entries that `put_together` needs besides."""
    if not is_compound(tensor):
        return {key: tensor.detach()}, {}
    names, context = tensor.__tensor_flatten__()
    made = {"class": class_name(tensor), "of": list(names), "context": context, "size": tensor.shape}
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {f"{key}/": made | {"stride": tensor.stride()}}
    for name in names:
        inner, more = take_apart(f"{key}/{name}", getattr(tensor, name))
        tensors |= inner
        plain |= more
    return tensors, plain


def put_together(values: dict[str, Any]) -> None:
    """Make the tensors of `values`, state by key, again that were taken apart, in place."""
    for key in sorted((key for key in values if key.endswith("/")), key=len, reverse=True):  # the inner ones first
        made = values.pop(key)
        inner = {name: values.pop(key + name) for name in made["of"]}
        kind = _find_class(made["class"])
        values[key[:-1]] = kind.__tensor_unflatten__(inner, made["context"], made["size"], made["stride"])


def _find_class(name: str) -> Any:
    """The subclass of torch.Tensor of this name, among those that the program has imported: a file imports nothing."""
    pending: list[type] = [torch.Tensor]
    while pending:
        kind = pending.pop()
        if f"{kind.__module__}.{kind.__qualname__}" == name:
            return kind
        pending += kind.__subclasses__()
    raise InputError(f"the optimizer's state holds a {name}, which this program has not imported; import it first")
