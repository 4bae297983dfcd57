"""Faults of pipelines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from halfmesh.amp.optimizer import MixedPrecisionOptimizer
from halfmesh.engine.microbatches import BatchLoss
from halfmesh.parallel.pipeline.axis import StageParameters
from halfmesh.parallel.pipeline.runner import Pipeline
from halfmesh.parallel.pipeline.stage import StageModule
from halfmesh.parallel.reducer import SharedGradients
from halfmesh.utils.tensors import map_tensors

from . import trains


def stages_not_tied(patch: pytest.MonkeyPatch) -> None:
    """A weight that the first and the last stage share learns in each of them by itself."""
    patch.setattr(SharedGradients, "finish", lambda self: None)


def microbatches_not_divided(patch: pytest.MonkeyPatch) -> None:
    """The mean over microbatches is a sum."""
    inner = MixedPrecisionOptimizer.scaled
    patch.setattr(MixedPrecisionOptimizer, "scaled", lambda self, loss, divisor: inner(self, loss, 1.0))


def scale_not_in_stage_loss(patch: pytest.MonkeyPatch) -> None:
    """The last stage's loss is not scaled."""
    patch.setattr(MixedPrecisionOptimizer, "scaled", lambda self, loss, divisor: loss.float() / divisor)


def norm_of_every_stage(patch: pytest.MonkeyPatch) -> None:
    """What several stages hold counts several times in the norm."""
    patch.setattr(StageParameters, "replicas", lambda self, param: 1)


def reduced_too_early(patch: pytest.MonkeyPatch) -> None:
    """Gradients are sent over the data ranks in the backward of the first microbatch."""
    inner = Pipeline.train

    def train(self: Pipeline, calls: Any, known: Any, finish: Any, on_last: Any) -> None:
        on_last([param for part in self.stages for param in part.params], True)
        inner(self, calls, known, finish, lambda params, rest: None)

    patch.setattr(Pipeline, "train", train)


def weight_gradients_lost(patch: pytest.MonkeyPatch) -> None:
    """The second half of a backward in two halves has no weights."""
    patch.setattr(StageModule, "parameters", lambda self, recurse=True: iter(()))


def last_microbatch_lost(patch: pytest.MonkeyPatch) -> None:
    """The last microbatch has no gradients."""
    inner = BatchLoss.finish

    def finish(self: BatchLoss, output: Any, index: int) -> torch.Tensor:
        return inner(self, output, index) * (index + 1 < len(self.calls))

    patch.setattr(BatchLoss, "finish", finish)


def targets_of_another_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The loss of a microbatch takes the targets of the next one."""
    inner = BatchLoss.__init__

    def init(self: BatchLoss, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        self.calls = [*self.calls[1:], self.calls[0]]

    patch.setattr(BatchLoss, "__init__", init)
    patch.setattr(BatchLoss, "other_loss", lambda *args: math.nan)  # else the engine itself sees it


def microbatch_weights_lost(patch: pytest.MonkeyPatch) -> None:
    """A weighted loss is divided by the weight of its last microbatch."""
    inner = BatchLoss.figures

    def figures(self: BatchLoss, device: torch.device) -> torch.Tensor:
        self._weights = dict([list(self._weights.items())[-1]])
        return inner(self, device)

    patch.setattr(BatchLoss, "figures", figures)


def loss_of_the_last_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The loss that is told is that of the last microbatch."""
    inner = BatchLoss.figures

    def figures(self: BatchLoss, device: torch.device) -> torch.Tensor:
        found = inner(self, device)
        found[0] = list(self._losses.values())[-1]
        return found

    patch.setattr(BatchLoss, "figures", figures)


def border_gradient_doubled(patch: pytest.MonkeyPatch) -> None:
    """The gradient that goes back from one stage to the one before is too large by two."""
    _received(patch, lambda self, x, number: x + (x - x.detach()))


def activations_of_the_first_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Every microbatch goes on with what was received for the first: a buffer is used twice."""
    kept: dict[int, torch.Tensor] = {}

    def first(number: int, x: torch.Tensor) -> torch.Tensor:
        kept[0] = x.detach().clone() if number == 0 else kept[0]
        return x + (kept[0] - x).detach()

    _received(patch, lambda self, x, number: first(number, x))


def _received(patch: pytest.MonkeyPatch, change: Any) -> None:
    """A stage works on what `change` makes of what it received."""
    inner, number = StageModule.compute, iter(range(10**9))

    def compute(self: StageModule, call: Any, activations: Any) -> Any:
        if trains() and self.batch is not None and activations is not None:
            index = next(number) % len(self.batch.calls)
            activations = map_tensors(lambda x: change(self, x, index), activations)
        return inner(self, call, activations)

    patch.setattr(StageModule, "compute", compute)


def piece_left_out(patch: pytest.MonkeyPatch) -> None:
    """The first stage leaves out its last block: the model is cut in the wrong place."""
    inner = StageModule.__init__

    def init(self: StageModule, model: Any, pieces: Any, index: int, *rest: Any) -> None:
        inner(self, model, pieces[: len(pieces) - (index == 0)], index, *rest)

    patch.setattr(StageModule, "__init__", init)
