"""Whether the losses of microbatches make the loss of their batch: the one that is trained on in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isclose, isfinite, isnan, nan
from typing import Any

import torch
from torch import nn

from ..amp.precision import Precision
from ..amp.recipe import HALF
from ..errors import InputError
from ..log import get_logger
from ..parallel.pipeline.pieces import Call
from ..parallel.pipeline.tracing import unchanged
from ..parallel.random import random_state, set_random_state
from ..tensors import map_tensors, tensors_of
from .accumulation import LossReduction
from .handles import Handle, replace

_log = get_logger(__name__)

_RTOL, _RTOL_HALF = 5e-4, 2e-2  # what rounding does to a loss in fp32, or in half precision, is far below
_ATOL = 1e-6  # terms of both signs may cancel out


class WholeBatch:
    """On the last stage: a batch whose criterion is computed once more, for all of its samples together.

    Args:
        criterion: the function.
        call: its call for the batch, with `handle` in the place of the output.
        output: what the model returns for the batch, without memory.
    """

    def __init__(self, criterion: Callable[..., Any], call: Call, handle: Handle, output: Any) -> None:
        self._criterion = criterion
        self._handle = handle
        args = map_tensors(torch.clone, (call.args, dict(call.kwargs)))  # a criterion may write into its targets
        self._args, self._kwargs = args
        self._whole = tensors_of(output)
        self._outputs: dict[int, Any] = {}

    def keep(self, output: Any, index: int) -> None:
        """The output of microbatch `index`. It is copied to the host: the device may have no room for all."""
        self._outputs[index] = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), output)

    def other_loss(self, losses: Sequence[float], divisor: float, precision: Precision) -> float:
        """The batch's loss, if it is another than the sum of `losses`, of the microbatches, by `divisor`; else nan.

        Nothing is compared if the criterion draws random numbers, or cannot take the outputs joined. A weighted loss
        is what it means: its sum by its weight.
        """
        state = random_state(precision.device)
        try:
            with torch.no_grad(), _as_it_was(self._criterion):
                output = self._joined(precision.device)
                args, kwargs = (replace(given, self._handle, output) for given in (self._args, self._kwargs))
                value = precision.criterion(self._criterion, *args, **kwargs)
            total, weight = (value, 1.0) if isinstance(value, torch.Tensor) else value
            whole = float(total) / float(weight)
        except Exception as error:  # whatever the criterion does with more samples than it knows here
            _log.info("whether the criterion is a mean over samples could not be tried (%s)", error)
            return nan
        finally:
            drew = _differ(state, random_state(precision.device))
            set_random_state(state, precision.device)
        rtol = _RTOL_HALF if total.dtype in HALF else _RTOL
        size = max(abs(whole), sum(map(abs, losses)) / divisor)
        equal = abs(sum(losses) / divisor - whole) <= rtol * size + _ATOL
        return nan if drew or equal or not isfinite(whole) else whole

    def _joined(self, device: torch.device) -> Any:
        """The output of the whole batch."""
        joined = []
        parts = zip(*(tensors_of(self._outputs[index]) for index in range(len(self._outputs))), strict=True)
        for some, whole in zip(parts, self._whole, strict=True):
            tensor = torch.cat(some, _batch_dim(some, whole.shape)).to(device)
            joined.append(tensor.requires_grad_(tensor.is_floating_point() and whole.requires_grad))
        following = iter(joined)
        return map_tensors(lambda _: next(following), self._outputs[0])


def refuse_other_loss(made: float, whole: float, count: int, reduction: LossReduction) -> None:
    """Raise InputError if the losses of `count` microbatches make another loss than their batch has.

    Args:
        made: the loss that they make.
        whole: the batch's, or nan if it is the same.
    """
    if isnan(whole):
        return
    way = _OTHER_WAYS
    if reduction == "mean" and isclose(whole, made * count, rel_tol=_RTOL_HALF):
        way = "The criterion sums over the samples: set loss_reduction='sum'"
    elif reduction == "sum" and isclose(whole * count, made, rel_tol=_RTOL_HALF):
        way = "The criterion is a mean over the samples: set loss_reduction='mean'"
    raise InputError(
        f"the criterion gives {whole:.6g} for the whole batch, but its {count} microbatches make {made:.6g} "
        f"(loss_reduction={reduction!r}): a pipeline would train on another loss than one process. {way}"
    )


_OTHER_WAYS = (
    "A criterion with class weights or ignore_index has to return (sum, weight), with loss_reduction='weighted': "
    "`total = F.cross_entropy(output, target, weight, ignore_index=i, reduction='sum')`, then `return total, (target "
    "!= i).sum()`, or with class weights `return total, weight[target[target != i]].sum()`. One that compares the "
    "samples of a batch with each other (a contrastive loss, a norm over the batch) cannot be split into microbatches: "
    "train it without parallel.pipeline"
)


def _batch_dim(parts: Sequence[torch.Tensor], whole: torch.Size) -> int:
    """The dim in which a whole batch's tensor is larger than that of one of its microbatches."""
    part = parts[0].shape
    dims = [dim for dim, (mine, all_) in enumerate(zip(part, whole, strict=True)) if mine != all_]
    if len(dims) != 1 or whole[dims[0]] != len(parts) * part[dims[0]]:
        raise InputError(f"an output of shape {tuple(part)} has no batch dim")
    return dims[0]


@contextmanager
def _as_it_was(criterion: Any) -> Iterator[None]:
    """What a call changes on the modules of `criterion` is put back."""
    modules = list(criterion.modules()) if isinstance(criterion, nn.Module) else []
    before = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
    try:
        with unchanged(modules):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether random numbers were drawn between two states."""
    plain = [(state["python"], state["numpy"][2:]) for state in (before, after)]
    pairs = zip(tensors_of(before), tensors_of(after), strict=True)
    return plain[0] != plain[1] or any(not torch.equal(one, other) for one, other in pairs)
