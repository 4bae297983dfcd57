"""What can be read of an engine, besides the attributes that it sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn, optim

from ..amp.cast import Precision
from ..amp.o1 import CastTable
from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.result import StepResult
from ..errors import InputError
from ..parallel.context import ParallelContext
from .cycle import GradientCycle
from .dataloader import EngineDataLoader
from .scheduling import LRAdvance


class UpdateReadings:
    """What can be read of an update, in an engine or without one."""

    _update: MixedPrecisionOptimizer

    @property
    def loss_scale(self) -> float:
        """The current loss scale (of loss_id 0); 1.0 without loss scaling. Reads the device."""
        return self.loss_scales[0]

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """The current loss scale of each loss. Reads the device."""
        return self._update.losses.current()

    @property
    def skipped_steps(self) -> int:
        """Updates skipped so far because of inf or nan. Reads the device."""
        return self._update.watch.skipped


class Readings(UpdateReadings):
    """The engine's read-only half."""

    model: nn.Module
    context: ParallelContext
    _dataloader: EngineDataLoader | None
    _eval_dataloader: EngineDataLoader | None
    _criterion: Callable[..., Any] | None
    _precision: Precision
    _cycle: GradientCycle
    _lr: LRAdvance
    _last: StepResult | None

    @property
    def dataloader(self) -> EngineDataLoader:
        """The training loader. Raises InputError if none was given to initialize."""
        if self._dataloader is None:
            raise InputError("no dataloader was given to initialize; pass one, or iterate a loader of your own")
        return self._dataloader

    @property
    def eval_dataloader(self) -> EngineDataLoader:
        """The evaluation loader. Raises InputError if none was given to initialize."""
        if self._eval_dataloader is None:
            raise InputError("no eval_dataloader was given to initialize; pass one, or iterate a loader of your own")
        return self._eval_dataloader

    @property
    def has_dataloader(self) -> bool:
        """Whether a training loader was given to initialize."""
        return self._dataloader is not None

    @property
    def has_eval_dataloader(self) -> bool:
        """Whether an evaluation loader was given to initialize."""
        return self._eval_dataloader is not None

    @property
    def has_criterion(self) -> bool:
        """Whether a criterion was given to initialize."""
        return self._criterion is not None

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self.context.device

    @property
    def optimizer(self) -> optim.Optimizer:
        return self._update.optimizer

    def master_params(self) -> Iterator[nn.Parameter]:
        """What the optimizer steps: the fp32 masters where there are any, else the model's parameters.

        Raises:
            InputError: between backward and step, where masters have no gradients yet.
        """
        if self._cycle.holds_gradients:
            raise InputError(
                "engine.master_params() was called between backward and step, where masters have no gradients yet; "
                "to clip set clip_grad_norm, or call engine.clip_grad_norm_(max_norm)"
            )
        return (param for group in self.optimizer.param_groups for param in group["params"])

    @property
    def casts(self) -> CastTable:
        """O1's lists of functions, to which a model's own can be added. Raises InputError outside O1."""
        if self._precision.casts is None:
            raise InputError("this engine casts by no lists of its own; only mode='apex' with opt_level='O1' does")
        return self._precision.casts

    @property
    def lr_scheduler(self) -> Any:
        self._lr.settle()
        return self._lr.scheduler

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    @property
    def grad_norm(self) -> float | None:
        """Gradient norm of the last update (`StepResult.grad_norm`); None before the first, or if not measured."""
        return None if self._last is None else self._last.grad_norm
