"""Splits batches into microbatches: finds the arguments to split along the batch dim, and chooses their number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...errors import InputError
from ...utils.tensors import map_tensors, parameter_names, position_names, tensors_of
from .pieces import Call


class Splitter:
    """Splits calls of one function along the batch, which is dim 0 of each tensor.

    Args:
        what: the function, whose signature names the positional arguments.
        non_split: names of arguments without a batch dim, which every microbatch gets unsplit.
        name: the function's name in messages.
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
        """The call as `count` calls, each with an equal number of the `rows` rows.

        Raises:
            InputError: a tensor has another number of rows, or something that is not a tensor has an item per row.
        """
        columns = [self._parts(name, value, count, rows) for name, value in self._named(call)]
        size = len(call.args)
        return [
            Call(values[:size], dict(zip(call.kwargs, values[size:], strict=True)))
            for values in zip(*columns, strict=True)
        ]

    def has_table(self, call: Call, rows: int) -> bool:
        """Return True if an argument that is not split has a dim of `rows`, such as the adjacency matrix of a graph."""
        shared = [value for name, value in self._named(call) if name in self.non_split]
        return any(rows in tensor.shape for tensor in tensors_of(shared))

    def _parts(self, name: str, value: Any, count: int, rows: int) -> Sequence[Any]:
        if name in self.non_split:
            return [value] * count
        if count > 1 and _has_items_of_rows(value, rows):
            raise InputError(
                f"{self.name}: {name} has {rows} items, as many as the batch has rows, but is not a tensor, and only "
                "tensors are split into microbatches; pass one tensor with a row for each sample (padded, if they "
                "differ in size). If it is the same for all samples, name it in "
                f"parallel.pipeline.non_split=({name!r},)"
            )

        def cut(index: int, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0:
                return tensor
            if tensor.shape[0] != rows:
                raise InputError(
                    f"{self.name}: {name} has {tensor.shape[0]} rows, and the batch has {rows}; arguments are split "
                    "into microbatches along their first dim. Name those without a batch dim in "
                    f"parallel.pipeline.non_split=({name!r},). (A graph, such as nodes with an edge_index, cannot be "
                    "split: train it without parallel.pipeline, or with microbatches=1 and schedule='gpipe')"
                )
            return tensor.chunk(count)[index]

        return [map_tensors(partial(cut, index), value) for index in range(count)]

    def _named(self, call: Call) -> list[tuple[str, Any]]:
        names = position_names(self._names, len(call.args))
        return [*zip(names, call.args, strict=True), *call.kwargs.items()]


def _has_items_of_rows(tree: Any, rows: int) -> bool:
    """Return True if `tree` holds a list or array with an item for each row: names of samples, boxes of each image.
    (A list of tensors that each have all rows does not count.)"""
    if isinstance(tree, np.ndarray):
        return tree.ndim > 0 and len(tree) == rows
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    is_row = isinstance(tree, (list, tuple)) and len(tree) == rows and not hasattr(tree, "_fields")
    if is_row and not any(_is_of_rows(item, rows) for item in items):
        return True
    return any(_has_items_of_rows(item, rows) for item in items)


def _is_of_rows(item: Any, rows: int) -> bool:
    """Return True if an item of a list has all rows, or may have them later (a handle of the model's output)."""
    if isinstance(item, torch.Tensor):
        return item.dim() > 0 and item.shape[0] == rows
    return not isinstance(item, (int, float, str, list, tuple, dict, np.ndarray, type(None)))


def choose_count(rows: int, most: float, fits: Callable[[int], bool]) -> int | None:
    """The number of equal microbatches of `rows` rows: the lowest that `fits` accepts with at most `most` rows each,
    else the highest that it accepts, else None."""
    counts = [n for n in range(1, rows + 1) if rows % n == 0 and fits(n)]
    return min((n for n in counts if rows / n <= most), default=max(counts, default=None))
