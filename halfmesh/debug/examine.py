"""Compute the last batch once more, and find the first inf or nan over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import shorten
from ..parallel.pipeline.microbatches import parameter_names
from ..tensors import tensors_of
from .faults import Fault, FaultFinder, first_of_all
from .last_batch import LastBatch
from .parts import Parts
from .replay import find_problem, replay
from .tensor_numbers import is_fine


def examine(parts: Parts, batch: LastBatch) -> tuple[Fault | None, list[str], str | None]:
    """The first fault over all ranks, what was not computed as it was then, and why nothing was computed. All ranks
    together."""
    problem = find_problem(parts, batch)
    if problem is not None:
        return None, [], problem
    assert batch.call is not None
    spoilt = [name for name, buffer in parts.model.named_buffers() if not is_fine(buffer)]
    finder = FaultFinder()
    finder.look_at_start(parts.model, _arguments(parts.model, *batch.call))
    notes = replay(parts, batch, finder)
    everyone = parts.context.everyone((finder.first, spoilt))
    buffers = list(dict.fromkeys(name for _, names in everyone for name in names))
    if buffers:
        notes.append(f"the buffers {shorten(buffers)} hold inf or nan now, from this batch or before it")
    return first_of_all([fault for fault, _ in everyone]), notes, None


def _arguments(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the model was called with, each with the name of the argument."""
    names = [name for name in parameter_names(model) if not name.startswith("*")]
    named = [(names[i] if i < len(names) else f"{i + 1}", value) for i, value in enumerate(args)]
    for name, value in [*named, *kwargs.items()]:
        for tensor in tensors_of(value):
            yield name, tensor
