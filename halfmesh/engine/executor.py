"""Forward and criterion of the loop: immediate in this process, or deferred until the pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import InputError, did_you_mean
from ..parallel.mesh import ParallelContext
from ..utils.tensors import tensors_of
from .accumulation import Accumulation
from .parallelize import ParallelModel

if TYPE_CHECKING:
    from ..config.schema import PipelineConfig
    from .pipeline_executor import PipelineExecutor


@contextmanager
def random_numbers(
    parallel_model: ParallelModel, model: nn.Module, saving: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[None]:
    """The scope of a forward, or of a batch's passes through stages: in training the model draws from its own
    generators. (With stages in evaluation, too, where some modules may be in training mode.)"""
    random, trains = parallel_model.random, model.training or parallel_model.plans.partition is not None
    if random is None or random.is_open or not trains:  # open: a criterion that calls the engine
        with saving():
            yield
        return
    for settle in parallel_model.settles:  # a backward may have left a fork open, which must not be restored
        settle()
    with parallel_model.host_random if parallel_model.same_layers else nullcontext(), random:
        try:
            with saving():
                yield
        finally:
            for settle in parallel_model.settles:
                settle()


class DirectExecutor:
    """Computes immediately: no pipeline splits the model."""

    stages = ()

    def __init__(self, parallel_model: ParallelModel, model: nn.Module, accumulation: Accumulation) -> None:
        self._model = model
        self._precision = accumulation.precision
        self._data = parallel_model.data
        self._sequences = parallel_model.sequences
        saving, is_alone = parallel_model.saving(model), parallel_model.random is None
        self._scope = saving if is_alone else partial(random_numbers, parallel_model, model, saving)
        self._same = parallel_model.same

    @property
    def forward(self) -> Callable[..., Any]:
        """Returns the model's output. (Not kept here: this object, referred to by itself, would outlive the engine.)"""
        return partial(self._call, self._model)

    def method(self, name: str) -> Callable[..., Any]:
        """The method `name` of the model, to be called as `forward` is.

        Raises:
            InputError: there is none; or, with `parallel.context`, gradients are on.
        """
        model = self._model
        if not callable(getattr(model, name, None)):
            raise InputError(
                f"engine.call({name!r}): {type(model).__name__} has no such method{did_you_mean(name, dir(model))}"
            )
        if self._sequences is not None and torch.is_grad_enabled():
            raise InputError(
                f"engine.call({name!r}): under parallel.context only forward is trained with each rank's tokens; call "
                "it under torch.no_grad(), or compute what trains in forward"
            )
        return partial(self._call, self._data.method(model, name))

    def _call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        for ranks in self._same:
            ranks.compare_inputs(self._model.training, args, kwargs)
        with self._scope():
            output = self._precision.forward(function, *args, **kwargs)
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


def make_executor(
    parallel_model: ParallelModel,
    model: nn.Module,
    accumulation: Accumulation,
    context: ParallelContext,
    options: PipelineConfig,
    meets_in_forward: bool,
) -> DirectExecutor | PipelineExecutor:
    """The executor for a model that was cast and parallelized."""
    if "pipeline" not in parallel_model.axes:
        return DirectExecutor(parallel_model, model, accumulation)
    from .pipeline_executor import PipelineExecutor

    return PipelineExecutor(parallel_model, model, accumulation, context, options, meets_in_forward)
