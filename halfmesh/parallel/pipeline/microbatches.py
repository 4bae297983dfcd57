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
from ...tree import map_tensors
from .boundary import tensors_of
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
        """Rows of the first tensor that is split; None if there is none.

        Raises:
            InputError: other tensors have other numbers of rows.
        """
        sizes = [
            (name, tensor.shape[0])
            for name, value in self._named(call)
            if name not in self.non_split
            for tensor in tensors_of(value)
            if tensor.dim()
        ]
        if not sizes:
            return None
        first, rows = sizes[0]
        for name, size in sizes:
            if size != rows:
                raise InputError(
                    f"{self.name}: {name} has {size} rows, and {first} has {rows}; arguments are split into "
                    "microbatches along their first dim. Name those without a batch dim in parallel.pipeline.non_split="
                    f"({name!r},)"
                )
        return rows

    def split(self, call: Call, count: int, rows: int) -> list[Call]:
        """The call in `count` equal parts of `rows` rows in all."""
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
        if count > 1 and _has_rows_without_tensors(value, rows):
            raise InputError(
                f"{self.name}: {name} has {rows} items, as many as the batch has rows, but they are no tensors, and "
                "are not split into microbatches; pass a tensor, or, if each microbatch needs all of it, name it in "
                f"parallel.pipeline.non_split=({name!r},)"
            )

        def cut(index: int, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0:
                return tensor
            if tensor.shape[0] != rows:
                raise InputError(
                    f"{self.name}: {name} has {tensor.shape[0]} rows, and the batch has {rows}; name arguments without "
                    f"a batch dim in parallel.pipeline.non_split=({name!r},)"
                )
            return tensor.chunk(count)[index]

        return [map_tensors(partial(cut, index), value) for index in range(count)]

    def _named(self, call: Call) -> list[tuple[str, Any]]:
        names = list(takewhile(lambda name: not name.startswith("*"), self._names))
        positional = [(names[i] if i < len(names) else f"argument {i + 1}", value) for i, value in enumerate(call.args)]
        return [*positional, *call.kwargs.items()]


def _has_rows_without_tensors(value: Any, rows: int) -> bool:
    """Whether it may be one item for each row: names of samples, an array of numpy."""
    if isinstance(value, (list, tuple)):
        return len(value) == rows and not any(isinstance(item, (torch.Tensor, list, tuple, dict)) for item in value)
    return isinstance(value, np.ndarray) and value.ndim > 0 and len(value) == rows


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
