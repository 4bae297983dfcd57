"""Batches in microbatches: which arguments are split along the batch, and into how many parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from ...errors import InputError
from ...tensors import map_tensors, tensors_of
from .pieces import Call


class Splitter:
    """Splits calls of one function along the batch, which is dim 0 of each tensor.

    Args:
        what: the function, whose parameters' names positional arguments get.
        non_split: names of arguments that have no batch dimension, and go into every microbatch as they are.
        name: how messages call the function.
    """

    def __init__(self, what: Callable[..., Any], non_split: Collection[str], name: str) -> None:
        self._names = parameter_names(what)
        self.non_split = frozenset(non_split)
        self.name = name

    def batch_size(self, call: Call) -> int | None:
        """Rows of the first tensor that is split; None if there is none."""
        found = (t for name, value in self._named(call) if name not in self.non_split for t in tensors_of(value))
        return next((tensor.shape[0] for tensor in found if tensor.dim()), None)

    def split(self, call: Call, count: int, rows: int) -> list[Call]:
        """The call in `count` equal parts of `rows` rows in all.

        Raises:
            InputError: a tensor has another number of rows, or what is no tensor would have to be split.
        """
        named = self._named(call)
        parts: list[list[Any]] = [[] for _ in range(count)]
        for name, value in named:
            for part, piece in zip(parts, self._parts(name, value, count, rows), strict=True):
                part.append(piece)
        size = len(call.args)
        return [Call(tuple(part[:size]), dict(zip(call.kwargs, part[size:], strict=True))) for part in parts]

    def _parts(self, name: str, value: Any, count: int, rows: int) -> Sequence[Any]:
        if name in self.non_split:
            return [value] * count
        if count > 1 and _has_items_of_rows(value, rows):
            raise InputError(
                f"{self.name}: {name} has {rows} items, as many as the batch has rows, but is no tensor, and is not "
                "split into microbatches; pass one tensor with a row for each sample (padded, if they differ in size). "
                f"If it is the same for all samples, name it in parallel.pipeline.non_split=({name!r},)"
            )

        def cut(index: int, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0:
                return tensor
            if tensor.shape[0] != rows:
                raise InputError(
                    f"{self.name}: {name} has {tensor.shape[0]} rows, and the batch has {rows}; arguments are split "
                    "into microbatches along their first dim. Name those without a batch dim in "
                    f"parallel.pipeline.non_split=({name!r},)"
                )
            return tensor.chunk(count)[index]

        return [map_tensors(partial(cut, index), value) for index in range(count)]

    def _named(self, call: Call) -> list[tuple[str, Any]]:
        names = list(takewhile(lambda name: not name.startswith("*"), self._names))
        positional = [(names[i] if i < len(names) else f"argument {i + 1}", value) for i, value in enumerate(call.args)]
        return [*positional, *call.kwargs.items()]


def _has_items_of_rows(tree: Any, rows: int) -> bool:
    """Whether somewhere in `tree` there may be one item for each row: names of samples, boxes of each image, an array
    of numpy. (A list of tensors that each have all rows is none.)"""
    if isinstance(tree, np.ndarray):
        return tree.ndim > 0 and len(tree) == rows
    if isinstance(tree, dict):
        return any(_has_items_of_rows(value, rows) for value in tree.values())
    if not isinstance(tree, (list, tuple)):
        return False
    if len(tree) == rows and not hasattr(tree, "_fields") and not any(_is_of_rows(item, rows) for item in tree):
        return True
    return any(_has_items_of_rows(item, rows) for item in tree)


def _is_of_rows(item: Any, rows: int) -> bool:
    """Whether an item of a list has all rows, or stands for something that has (an output of the model)."""
    if isinstance(item, torch.Tensor):
        return item.dim() > 0 and item.shape[0] == rows
    return not isinstance(item, (int, float, str, list, tuple, dict, np.ndarray, torch.Tensor, type(None)))


def choose_count(rows: int, most: float, fits: Callable[[int], bool]) -> int | None:
    """Into how many equal microbatches `rows` rows are split: as few as `fits` the schedule, of `most` rows at most; if
    there is none, as many as fit. None: no number of equal ones fits."""
    counts = [n for n in range(1, rows + 1) if rows % n == 0 and fits(n)]
    return min((n for n in counts if rows / n <= most), default=max(counts, default=None))


def parameter_names(what: Callable[..., Any]) -> list[str]:
    """Names of the parameters, those of *args and **kwargs with their stars; none of what is built in."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    try:
        parameters = inspect.signature(getattr(what, "forward", what)).parameters
    except (TypeError, ValueError):
        return ["*args", "**kwargs"]
    return [stars.get(parameter.kind, "") + name for name, parameter in parameters.items()]
