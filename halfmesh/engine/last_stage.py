"""What happens to the outputs of the microbatches at the end of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..amp.cast import Precision
from ..amp.optimizer import MixedPrecisionOptimizer
from ..parallel.pipeline.boundary import tensors_of
from ..parallel.pipeline.pieces import Call
from ..tree import map_tensors
from .accumulation import Accumulation
from .handles import Handle, PipelineLoss, replace


@dataclass
class CriterionCalls:
    """The criterion's calls of the same microbatches, with the output's handle in the output's place."""

    function: Callable[..., Any]
    calls: Sequence[Call]


class LastStage:
    """What the last stage does with the outputs of the microbatches, and keeps of it."""

    def __init__(
        self,
        precision: Precision,
        update: MixedPrecisionOptimizer,
        accumulation: Accumulation,
        loss: PipelineLoss,
        keeps_outputs: bool,
    ) -> None:
        self._precision = precision
        self._update = update
        self._accumulation = accumulation
        self._handle: Handle = loss.output
        self._criterion: CriterionCalls = loss.call
        count = len(self._criterion.calls)
        self._divisor = accumulation.seed_divisor * (count if accumulation.reduction == "mean" else 1)
        self._keeps_outputs = keeps_outputs
        self._losses: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, Any] = {}

    def finish(self, output: Any, index: int) -> torch.Tensor:
        """What backward of microbatch `index` begins with."""
        output = self._precision.cast_output(output)
        if self._keeps_outputs:
            self._outputs[index] = map_tensors(torch.Tensor.detach, output)
        call = self._criterion.calls[index]
        args, kwargs = (replace(given, self._handle, output) for given in (call.args, dict(call.kwargs)))
        value = self._precision.criterion(self._criterion.function, *args, **kwargs)
        total, weight = self._accumulation.read_loss(value)
        self._losses[index] = total.detach()
        if weight is not None:
            self._weights[index] = weight
        return self._update.scaled(total, self._divisor)

    def figures(self, mean: bool, device: torch.device) -> torch.Tensor:
        """The batch's loss, and the weight of a weighted one: float64 [2]."""
        losses = torch.stack(list(self._losses.values())).to(device, torch.float64)
        weights = [weight.to(device) for weight in self._weights.values()]
        weight = torch.stack(weights).sum() if weights else torch.zeros_like(losses[0])
        return torch.stack([losses.mean() if mean else losses.sum(), weight])

    def output(self) -> Any:
        """The outputs of all microbatches as one."""
        parts = [tensors_of(self._outputs[index]) for index in range(len(self._outputs))]
        joined = iter([_join(tensors) for tensors in zip(*parts, strict=True)])
        return map_tensors(lambda _: next(joined), self._outputs[0])


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)) if tensors[0].dim() == 0 else torch.cat(list(tensors))
