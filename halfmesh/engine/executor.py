"""Forward and criterion of the loop: immediate in this process, or deferred until the pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.precision import Precision, cast_model
from ..parallel.mesh import ParallelContext
from ..parallel.rank_checks import SameCalls
from ..utils.tensors import tensors_of
from .accumulation import Accumulation

if TYPE_CHECKING:
    from ..config.schema import PipelineConfig
    from .parallelize import ParallelModel
    from .pipeline_executor import PipelineExecutor


class DirectExecutor:
    """Computes immediately: no pipeline splits the model.

    Args:
        scope: entered around each forward.
        same: compare calls over the ranks that compute one batch.
    """

    stages = ()

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        scope: Callable[[], AbstractContextManager[Any]],
        same: Sequence[SameCalls],
    ) -> None:
        self._model = model
        self._precision = precision
        self._scope = scope
        self._same = same

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        for ranks in self._same:
            ranks.compare_inputs(self._model.training, args, kwargs)
        with self._scope():
            output = self._precision.forward(self._model, *args, **kwargs)
        for ranks in self._same:
            ranks.compare_outputs(self._model.training, output)
        return output

    def criterion(self, criterion: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The criterion's value."""
        if self._same and self._model.training and torch.is_grad_enabled():
            targets = [tensor for tensor in tensors_of((args, kwargs)) if not tensor.requires_grad]
            for ranks in self._same if targets else ():  # not the outputs, which are equal but for rounding
                ranks.compare_inputs(True, targets, {}, of="targets")
        return self._precision.criterion(criterion, *args, **kwargs)

    def close(self) -> None:
        """Do nothing: nothing is in flight."""


def make_executor(
    parallel_model: ParallelModel,
    model: nn.Module,
    precision: Precision,
    update: MixedPrecisionOptimizer,
    accumulation: Accumulation,
    context: ParallelContext,
    options: PipelineConfig,
) -> DirectExecutor | PipelineExecutor:
    """The executor for a model that was cast and parallelized."""
    params = parallel_model.axes.get("pipeline")
    if params is None:
        return DirectExecutor(model, precision, parallel_model.around_call(model), parallel_model.same)
    from ..parallel.pipeline.runner import Pipeline
    from ..parallel.pipeline.stage import ForwardContext
    from ..parallel.pipeline.stage_params import StageParameters
    from ..parallel.registries import SCHEDULES
    from .pipeline_executor import PipelineExecutor

    assert isinstance(params, StageParameters)
    cast_model(params.meta_model, update.recipe)
    forward_context = ForwardContext(precision.autocast, parallel_model.settle, parallel_model.saving(model))
    schedule = SCHEDULES.get(options.schedule)
    pipeline = Pipeline(model, params, schedule, context, forward_context)
    scope = partial(parallel_model.random_numbers, model)
    return PipelineExecutor(
        model, pipeline, options, context, precision, update, accumulation, scope, parallel_model.same
    )
