"""Checks before the first update under a pipeline that the model computes each row of a batch independently.

A model that compares rows with each other, or takes a table that has a row for each sample by chance, computes another
loss on microbatches than on the full batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import isnan, nan
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..parallel.comm import gather_objects
from ..parallel.modules import unchanged
from ..parallel.pipeline.pieces import Call
from ..parallel.pipeline.runner import Pipeline
from ..parallel.trial import HALF_TOLERANCE, TOLERANCE, find_gap, no_side_effects, rounds_products
from ..utils.tensors import map_tensors, tensors_of
from ..utils.torch_private import BATCH_NORMS

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
NOT_BY_ROWS = (
    "Either the forward mixes the rows of a batch (attention or a softmax over them, statistics of the batch, experts "
    "with a capacity, a graph): train it without parallel.pipeline, or with microbatches=1 and schedule='gpipe'. Or an "
    "argument that is the same for all samples has as many rows as the batch: name it in parallel.pipeline.non_split"
)


def refuse_mixed_rows(
    model: nn.Module, pipeline: Pipeline, whole: Call, parts: Sequence[Call], device: torch.device, half: bool
) -> None:
    """Compute some rows at once and in microbatches, and compare. All ranks together; the model's state is restored.

    BatchNorm, which may see microbatches, and dropout run as in evaluation; so do all modules, if the model still draws
    random numbers.

    Args:
        whole: the rows of `parts`, the first microbatches.
        half: something is computed in half precision.

    Raises:
        InputError: on all ranks, if the outputs differ by more than rounding.
    """
    calls = whole, *parts
    trial = _RowTrial(model, pipeline, calls, device)
    for evaluated in ((*BATCH_NORMS, *_DROPOUT), (nn.Module,)):
        with unchanged(model.modules()):
            for module in model.modules():
                module.training = module.training and not isinstance(module, evaluated)
            if not all(gather_objects(all(map(pipeline.can_run, calls)))):
                continue
            gaps, rounds = zip(*gather_objects((trial.find_gap(), half or rounds_products())), strict=True)
            if any(map(isnan, gaps)):
                continue
            limit = HALF_TOLERANCE if any(rounds) else TOLERANCE
            if max(gaps) <= limit:
                return
            where = [place for place in gather_objects(trial.find_module(limit)) if place]
            break
    else:
        return
    first = (
        f" The first module whose output differs is {min(where)[1]}: it, or code before it in the module around it."
        if where
        else ""
    )
    raise InputError(
        f"{type(model).__name__} computes other outputs for the first {len(parts)} microbatches together than one by "
        f"one (they differ by {max(gaps):.2g} of their norm), so a pipeline would train on another loss than one "
        f"process.{first} {NOT_BY_ROWS}"
    )


class _RowTrial:
    """Calls of a model: of some microbatches together, and of each of them."""

    def __init__(self, model: nn.Module, pipeline: Pipeline, calls: Sequence[Call], device: torch.device) -> None:
        self._model, self._pipeline, self._calls, self._device = model, pipeline, calls, device

    def find_gap(self) -> float:
        """The largest difference of the outputs, on the last stage (else 0); nan if this rank drew random numbers."""
        outputs, drew = zip(*self._run(), strict=True)
        return nan if any(drew) else _gap_of(*outputs) if self._pipeline.has_last else 0.0

    def find_module(self, limit: float) -> tuple[int, str] | None:
        """The first module of this rank whose outputs differ by more than `limit`: its index among all, and name."""
        seen: list[tuple[int, str, Any]] = []

        def look(place: int, name: str, module: nn.Module, args: Any, output: Any) -> None:
            copied = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), output)
            seen.append((place, f"{name} ({type(module).__name__})", copied))

        hooks = [
            module.register_forward_hook(partial(look, place, name))
            for place, (name, module) in enumerate(self._model.named_modules())
        ]
        try:
            ends = [len(seen) for _ in self._run()]
        finally:
            for hook in hooks:
                hook.remove()
        calls = [seen[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        for (place, name, together), *apart in zip(*calls, strict=False):
            if _gap_of(together, *(output for _, _, output in apart)) > limit:
                return place, name
        return None

    def _run(self) -> Iterator[tuple[Any, bool]]:
        """The output of each call, and True if it drew random numbers."""
        for call in self._calls:
            with no_side_effects(self._model.modules(), self._device) as has_drawn:
                output, drew = self._pipeline.evaluate(call, None, everywhere=False), has_drawn()
            yield output, drew


def _gap_of(together: Any, *apart: Any) -> float:
    """The difference of the output of several microbatches together from their separate outputs."""
    gaps = [0.0]
    for whole, *parts in zip(*map(tensors_of, (together, *apart)), strict=False):
        dims = [dim for dim, size in enumerate(parts[0].shape) if size != whole.shape[dim]]
        if dims:
            gaps.append(find_gap(whole, torch.cat(parts, dims[0])))
        elif whole.dim():  # without rows: the same for all, such as a table (0-dim: a loss term, which is averaged)
            gaps += [find_gap(whole, part) for part in parts]
    return max(gaps)
