"""Checks before the first update under a pipeline that the model computes each row of a batch independently.

A model that compares rows with each other, or takes a table that has a row for each sample by chance, computes another
loss on microbatches than on the full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
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


def refuse_mixed_rows(model: nn.Module, pipeline: Pipeline, joined: Call, single: Sequence[Call], half: bool) -> None:
    """Compute some rows at once and in microbatches, and compare. All ranks together; the model's state is restored.

    BatchNorm, which may see microbatches, and dropout run as in evaluation; so do all modules, if the model still draws
    random numbers.

    Args:
        joined: the rows of `single`, the first microbatches.
        half: something is computed in half precision.

    Raises:
        InputError: on all ranks, if the outputs differ by more than rounding.
    """
    calls = joined, *single
    run = partial(_run, model, pipeline, calls)
    for evaluated in ((*BATCH_NORMS, *_DROPOUT), (nn.Module,)):
        with unchanged(model.modules()):
            for module in model.modules():
                module.training = module.training and not isinstance(module, evaluated)
            can_run = list(map(pipeline.can_run, calls))  # each of them: ranks may ask each other
            if not all(gather_objects(all(can_run))):
                continue
            outputs, drew, _ = zip(*run(), strict=True)
            gap = nan if any(drew) else _gap_of(*outputs) if pipeline.has_last else 0.0
            gaps, rounds = zip(*gather_objects((gap, half or rounds_products())), strict=True)
            if any(map(isnan, gaps)):
                continue
            limit = HALF_TOLERANCE if any(rounds) else TOLERANCE
            if max(gaps) <= limit:
                return
            names = [name for name in gather_objects(_find_module(model, run, limit)) if name]
            raise InputError(
                f"{type(model).__name__} computes other outputs for the first {len(single)} microbatches together than "
                f"one by one (they differ by {max(gaps):.2g} of their norm), so a pipeline would train on another loss "
                "than one process."
                + (f" The first module whose output differs is {min(names)[1]}, or code before it." if names else "")
                + f" {NOT_BY_ROWS}"
            )


def needs_whole(model: nn.Module, pipeline: Pipeline, joined: Call, single: Sequence[Call], half: bool) -> bool | None:
    """Return True if microbatches would change the outputs of the model in its present modes: those of some rows at
    once, and in microbatches, differ by more than rounding, or forward draws random numbers or writes state. None if
    nothing can be said, because all outputs are 0 or nan.

    All ranks that compute a batch together; arguments as of `refuse_mixed_rows`.
    """
    outputs, *effects = zip(*_run(model, pipeline, (joined, *single)), strict=True)
    limit = HALF_TOLERANCE if half or rounds_products() else TOLERANCE
    differs = any(map(any, effects)) or (pipeline.has_last and not _gap_of(*outputs) <= limit)
    floats = [tensor for tensor in tensors_of(outputs[0]) if tensor.is_floating_point()]
    is_empty = bool(floats) and not any(bool(tensor.nan_to_num(0.0, 0.0, 0.0).any()) for tensor in floats)
    differs, is_empty = pipeline.on_any_rank(differs, is_empty)
    return None if is_empty and not differs else differs


def _run(model: nn.Module, pipeline: Pipeline, calls: Sequence[Call]) -> Iterator[tuple[Any, bool, bool]]:
    """The output of each call, and True if it drew random numbers, or wrote state, on this rank; all is restored."""
    for call in calls:
        with no_side_effects(model.modules(), pipeline.context.device) as effects:
            output = pipeline.evaluate([call])
            drew, wrote = effects.drew(), effects.wrote()
        yield output, drew, wrote


def _find_module(
    model: nn.Module, run: Callable[[], Iterator[tuple[Any, bool, bool]]], limit: float
) -> tuple[int, str] | None:
    """The first module of this rank whose outputs differ by more than `limit`: its index among all, and name."""
    seen: list[tuple[int, str, Any]] = []

    def look(index: int, name: str, module: nn.Module, args: Any, output: Any) -> None:
        copied = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), output)
        seen.append((index, f"{name} ({type(module).__name__})", copied))

    with ExitStack() as hooks:
        for index, (name, module) in enumerate(model.named_modules()):
            hooks.callback(module.register_forward_hook(partial(look, index, name)).remove)
        ends = [len(seen) for _ in run()]
    calls = [seen[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    for (index, name, joined), *single in zip(*calls, strict=False):
        if _gap_of(joined, *(output for _, _, output in single)) > limit:
            return index, name
    return None


def _gap_of(joined: Any, *single: Any) -> float:
    """The difference of the output of several microbatches together from their separate outputs."""
    gaps = [0.0]
    for output, *others in zip(*map(tensors_of, (joined, *single)), strict=False):
        dims = [dim for dim, size in enumerate(others[0].shape) if size != output.shape[dim]]
        if dims:
            gaps.append(find_gap(output, torch.cat(others, dims[0])))
        elif output.dim():  # without rows: the same for all, such as a table (0-dim: a loss term, which is averaged)
            gaps += [find_gap(output, other) for other in others]
    return max(gaps)
