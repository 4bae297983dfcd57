"""What the last stage of a pipeline does with the outputs of the microbatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.precision import Precision
from ..errors import InputError
from ..parallel.pipeline.pieces import Call
from ..tensors import map_tensors, tensors_of
from .accumulation import Accumulation
from .handles import Handle, PipelineLoss, replace
from .whole_batch import WholeBatch


@dataclass
class CriterionCalls:
    """The criterion's call of each microbatch, with the output's handle in the output's place.

    Attributes:
        stamps: versions of the tensors in `calls`, which may not change before backward.
        whole: the call for the whole batch, if the losses of the microbatches are compared with it.
    """

    function: Callable[..., Any]
    calls: Sequence[Call]
    stamps: Sequence[tuple[int, int]]
    whole: WholeBatch | None


class LastStage:
    """Computes the loss of each microbatch, and keeps what is sent to the other stages.

    Args:
        params: those of this rank; the first loss is refused if it depends on them otherwise than through the output.
            None: not checked.
    """

    def __init__(
        self,
        precision: Precision,
        update: MixedPrecisionOptimizer,
        accumulation: Accumulation,
        loss: PipelineLoss,
        keeps_outputs: bool,
        params: Collection[nn.Parameter] | None = None,
    ) -> None:
        self._precision = precision
        self._update = update
        self._accumulation = accumulation
        self._handle: Handle = loss.output
        self._criterion: CriterionCalls = loss.call
        count = len(self._criterion.calls)
        self._divisor = accumulation.seed_divisor * (count if accumulation.reduction == "mean" else 1)
        self._keeps_outputs = keeps_outputs
        self._params = params
        self._losses: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, Any] = {}

    def finish(self, output: Any, index: int) -> torch.Tensor:
        """The scaled loss of microbatch `index`, from which backward runs."""
        output = self._precision.cast_output(output)
        if self._keeps_outputs:
            self._outputs[index] = map_tensors(torch.Tensor.detach, output)
        if self._criterion.whole is not None:
            self._criterion.whole.keep(output, index)
        call = self._criterion.calls[index]
        args, kwargs = (replace(given, self._handle, output) for given in (call.args, dict(call.kwargs)))
        value = self._precision.criterion(self._criterion.function, *args, **kwargs)
        total, weight = self._accumulation.check_loss(value)
        if self._params is not None and index == 0:
            _refuse_other_ways(total, output, {id(param) for param in self._params})
        self._losses[index] = total.detach()
        if weight is not None:
            self._weights[index] = weight
        return self._update.scaled(total, self._divisor)

    def figures(self, device: torch.device) -> torch.Tensor:
        """The batch's loss, its weight if weighted, and if compared the whole batch's loss, nan where that is the same:
        float64 [2] or [3]."""
        reduction, whole = self._accumulation.reduction, self._criterion.whole
        losses = torch.stack(list(self._losses.values())).to(device, torch.float64)
        weights = [weight.to(device) for weight in self._weights.values()]
        weight = torch.stack(weights).sum() if weights else torch.zeros_like(losses[0])
        figures = torch.stack([losses.mean() if reduction == "mean" else losses.sum(), weight])
        if whole is None:
            return figures
        divisor = {"mean": float(len(losses)), "sum": 1.0, "weighted": float(weight) or 1.0}[reduction]
        return torch.cat([figures, figures.new_tensor([whole.other_loss(losses.tolist(), divisor, self._precision)])])

    def output(self) -> Any:
        """The outputs of all microbatches as one."""
        parts = [tensors_of(self._outputs[index]) for index in range(len(self._outputs))]
        joined = iter([torch.cat([t if t.dim() else t[None] for t in tensors]) for tensors in zip(*parts, strict=True)])
        return map_tensors(lambda _: next(joined), self._outputs[0])


def _refuse_other_ways(loss: torch.Tensor, output: Any, params: Collection[int]) -> None:
    """Raise InputError if `loss` depends on parameters (by their ids) or activations otherwise than through `output`:
    other stages' parts of that would be missing."""
    ends = {tensor.grad_fn for tensor in tensors_of(output)}
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in ends or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in params or node.name() == "_EnterBackward":
            raise InputError(
                "the criterion's loss depends on the model otherwise than through its output (a penalty on weights, a "
                "term that a layer keeps), but this rank has the last stage only. Let the model return such a term "
                "with its output; for a penalty on weights use the optimizer's weight_decay"
            )
        todo += [following for following, _ in node.next_functions]
